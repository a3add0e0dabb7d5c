"""UnpadProducts: matrix products whose operands were padded for speed take them as they are."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import fx

from memopt.graph.rewrite import erase_unused, fake_value
from memopt.pass_manager import Change, Pass, PassResult, attempt_each
from memopt.patterns.column_padding import pads_of
from memopt.patterns.rows import PRODUCTS
from memopt.program import Program

aten = torch.ops.aten
_PAD, _SLICE = aten.constant_pad_nd.default, aten.slice.Tensor


class UnpadProducts(Pass):
    """Take zeros that were put behind rows and columns of a product's operands away again, with what cut them off.

    Algebra: [A 0]·[B; 0] = AB, and rows and columns of zeros in A and B give rows and columns that are cut off.

    On a GPU, Inductor pads operands whose rows are not aligned where it finds the product faster so. The copies of
    them exist in full beside the operands: of a language model's logits, say, and of their gradient. Without them a
    step is slower, and takes less memory.

    Cases: `mm` and `addmm`, padded behind the last row and the last column, by zeros, on both sides alike; all that
    reads the product cuts off what was added.

    Numbers: those of a product of another shape, which may add up in another order.

    Products that are read otherwise are left alone, and so are programs without a backward graph.
    """

    name: ClassVar[str] = "unpad_products"
    tolerance: ClassVar[float] = 2.0
    lowers_floor: ClassVar[bool] = True

    def run(self, program: Program) -> PassResult:
        """Return the program with the products of what was padded; one change per product."""
        if not program.training:
            return PassResult(program)
        products = [node for node in program.calls if node.target in PRODUCTS]
        if not any(_unpadded(operand) is not operand for node in products for operand in node.args):
            return PassResult(program)
        new = program.copy()
        changes, _ = attempt_each(
            [node for node in new.calls if node.target in PRODUCTS], lambda node: _unpad(new, node)
        )
        return PassResult.of(program, new, changes)


def _unpad(program: Program, node: fx.Node) -> Change | None:
    operands = tuple(_unpadded(operand) for operand in node.args)
    if node.kwargs or operands == node.args:
        return None
    *bias, left, right = (operand.meta["val"].shape for operand in operands)
    (rows, inner), (again, columns) = ((int(size) for size in shape) for shape in (left, right))
    if inner != again or any(shape[-1] not in (1, columns) or shape[:-1] not in ((), (1,), (rows,)) for shape in bias):
        return None
    results = _cut(node, rows, columns)
    if results is None or any(_is_seen(result, columns) for result in results):
        return None
    graph, target = node.graph, cast(Any, node.target)
    with graph.inserting_before(node):
        made = graph.call_function(target, operands)
    made.meta = {key: item for key, item in node.meta.items() if key not in ("val", "inplace")}
    made.meta["val"] = fake_value(program, target, operands)
    for result in results:
        result.replace_all_uses_with(made)
    names = tuple(result.name for result in results)
    erase_unused(graph, results)
    summary = f"{node.name} of matrices as they are, {rows} by {inner} and {inner} by {columns}, without padding"
    return Change(summary, (node.name, *(name for name in names if name != node.name)), (made.name,))


def _unpadded(operand: Any) -> Any:
    """What was padded, behind its last row and column with zeros; the operand itself where it was not so padded."""
    if operand.target is not _PAD or (len(operand.args) > 2 and operand.args[2] != 0):
        return operand
    sizes = pads_of(operand)
    return operand if any(sizes[::2]) or any(size < 0 for size in sizes) else operand.args[0]


def _cut(node: fx.Node, rows: int, columns: int) -> list[fx.Node] | None:
    """What of the product is read: its leading rows and columns; None where more is."""
    shape = tuple(int(size) for size in node.meta["val"].shape)
    if shape == (rows, columns):
        return [node]
    found: list[fx.Node] = []
    for user in node.users:
        if user.target is not _SLICE or not _leads(user):
            return None
        cut = _cut(user, rows, columns)
        if cut is None:
            return None
        found += cut
    return found


def _is_seen(node: fx.Node, columns: int) -> bool:
    """Whether it matters to a reader of the node that its rows lie further apart than they are long."""
    if node.meta["val"].stride() == (columns, 1):
        return False
    return any(user.op == "output" or user.target is aten.as_strided.default for user in node.users)


def _leads(node: fx.Node) -> bool:
    """Whether a slice begins at the beginning and leaves nothing out."""
    given: list[Any] = list(node.args[1:])
    _, start, _, step = given + [0, None, None, 1][len(given) :]
    return start in (0, None) and step == 1
