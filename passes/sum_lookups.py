"""SumLookups: the gradient of an embedding's table, summed up by row of the batch before the table's is written."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import torch
from torch import fx

from memopt.graph.rewrite import Builder, Refused, erase_unused
from memopt.pass_manager import Change, Pass, PassResult, attempt_each
from memopt.program import Program

aten, prims = torch.ops.aten, torch.ops.prims

_MASKED = aten._unsafe_masked_index_put_accumulate.default
_PLAIN = (aten._unsafe_index_put.default, aten.index_put.default)
_CONVERT = prims.convert_element_type.default
_INDEX_BYTES = 8


class SumLookups(Pass):
    """Add up the gradients of equal lookups in as many rows as there are lookups, then write those rows into a table.

    Algebra: the gradient of a table of V rows is G[v] = Σ g_i over the lookups i of row v, zero for rows that are
    looked up by none. Decomposed it is a table of zeros in float32 to which each g_i is added at its row, and which is
    then rounded. But N lookups find at most N rows: with r(i) the last of the lookups of the same row as i (the largest
    number per row, in a table of V numbers), S[r(i)] += g_i takes N rows in float32, and G[v_i] = round(S[r(i)]) writes
    each row that has a sum; several lookups of a row write the same. The table of zeros in float32, twice what the
    gradient itself takes, never exists: not at the end of backward, where most other gradients do.

    Cases:
        1. The sum is rounded to another precision: rows are written into zeros of that.
        2. The gradient, rounded or not, is added to another of the same table (tied weights: that of the layer that
           makes logits): rows are added to that, and written into it.
        3. Lookups that are masked, at a `padding_idx` say, add nothing; several lookups of one table, one after the
           other, are each treated so.

    Numbers: the sum of each element has the same terms, is begun with zero and rounded once: bitwise equal, but that
    in case 2 a gradient of -0.0 stays one where it was added to zero before. The order of a sum's terms is that of
    the device's atomic additions, now as before.

    Refusals: the sum is neither rounded nor added to another (its own size is needed anyway); there are so many
    lookups that the table in float32 is no larger than their rows; something else reads the sum in float32; the result
    would be laid out otherwise. Programs without a backward graph are returned as they are.
    """

    name: ClassVar[str] = "sum_lookups"

    def run(self, program: Program) -> PassResult:
        """Return the program with each sum over lookups by their rows; one change per table's gradient."""
        if not program.training:
            return PassResult(program)
        new = program.copy()
        changes, refusals = attempt_each(new.calls, lambda node: _summed(new, node))
        return PassResult.of(program, new, changes, refusals)


@dataclasses.dataclass(frozen=True)
class _Sum:
    """Values added to rows of zeros.

    Attributes:
        node: the operation.
        table: the value, [V, ...].
        index: the rows' numbers, of any shape; negative ones count from the end.
        values: what is added, [*index.shape, ...].
        mask: what of it counts, or None: all.
    """

    node: fx.Node
    table: torch.Tensor
    index: fx.Node
    values: fx.Node
    mask: fx.Node | None

    @property
    def lookups(self) -> int:
        """How many there are."""
        return int(self.index.meta["val"].numel())


def _summed(program: Program, node: fx.Node) -> Change | None:
    """Raises Refused before anything is edited."""
    found = _sum_of(node)
    if found is None:
        return None
    rounded = _only_reader(node, _CONVERT)
    given = rounded or node
    added = _only_reader(given, aten.add.Tensor)
    other = None if added is None else _other(added, given)
    if other is None:
        added = None
        if len(node.users) > 1:
            raise Refused("its sum is read by more than one operation")
        if rounded is None:
            raise Refused(f"its sum in {_name(found.table.dtype)} is what is read: nothing larger is made on the way")
    _check_bytes(found, given)
    end = added or given
    sums, writes = _Builder(node), _Builder(end, node)
    wrapped = sums.call(aten.remainder.Scalar, found.index, int(found.table.shape[0]))
    lookup = sums.lookups(found, wrapped)
    # What is masked may be out of range; else an operator that checks its indices is to see them.
    index = found.index if found.mask is None else wrapped
    value = given.meta["val"]
    rows = writes.call(aten.index.Tensor, sums.rows(found, lookup), [lookup])
    if rounded is not None:
        rows = writes.call(_CONVERT, rows, value.dtype)
    if other is not None:
        rows = writes.call(aten.add.Tensor, writes.call(aten.index.Tensor, other, [index]), rows)
        base = other
    else:
        base = writes.full(value.shape, value.dtype, value.device)
    result = writes.call(aten.index_put.default, base, [index], rows)
    # Another sum may be added to this one.
    result.meta["val"] = value.new_empty(value.shape) if other is None else other.meta["val"]
    before = tuple(item.name for item in (node, rounded, added) if item is not None)
    summary = f"{end.name} of {found.lookups} lookups in {found.table.shape[0]} rows"
    end.replace_all_uses_with(result)
    erase_unused(program.graph, [end])
    return Change(summary, before, (result.name,))


def _sum_of(node: fx.Node) -> _Sum | None:
    """The node as values added to rows of zeros, each row as a whole; None where it is none."""
    arguments: Any = node.args
    mask = None
    if node.target is _MASKED:
        zeros, mask, indices, values = arguments
    elif node.target in _PLAIN and len(arguments) > 3 and arguments[3] is True:
        zeros, indices, values = arguments[:3]
    else:
        return None
    if len(indices) != 1 or not isinstance(indices[0], fx.Node) or not _is_zeros(zeros):
        return None
    index, table = indices[0].meta["val"], node.meta["val"]
    whole = values.meta["val"].shape == (*index.shape, *table.shape[1:])
    if index.dtype is not torch.int64 or not index.numel() or table.dim() < 2 or not whole:
        return None
    return _Sum(node, table, indices[0], values, mask)


def _is_zeros(node: fx.Node) -> bool:
    filled = node.target is aten.full.default and node.args[1] in (0, False)
    return filled or node.target in (aten.zeros.default, aten.new_zeros.default)


def _only_reader(node: fx.Node, target: Any) -> fx.Node | None:
    """What alone reads the node, and only once, if it is such an operation."""
    if len(node.users) != 1:
        return None
    (user,) = node.users
    return user if user.target is target and [*user.args].count(node) == 1 else None


def _other(added: fx.Node, given: fx.Node) -> fx.Node | None:
    """What the gradient is added to, where rows of it can be added there in place."""
    other = added.args[1] if added.args[0] is given else added.args[0]
    if added.kwargs.get("alpha", 1) != 1 or not isinstance(other, fx.Node):
        return None
    mine, before, result = (item.meta["val"] for item in (given, other, added))
    if (mine.shape, mine.dtype) != (before.shape, before.dtype) or result.dtype != before.dtype:
        return None
    return other if before.stride() == result.stride() else None


def _check_bytes(found: _Sum, given: fx.Node) -> None:
    """Raises Refused where the rows of all lookups, as they are added up and as they are written, take no less."""
    width, size = math.prod(found.table.shape[1:]), found.table.element_size()
    saved = found.table.shape[0] * (width * size - _INDEX_BYTES)
    taken = found.lookups * (width * (size + given.meta["val"].element_size()) + _INDEX_BYTES)
    if taken >= saved:
        raise Refused(f"rows of its {found.lookups} lookups would take {taken} bytes and save {saved}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Builder(Builder):
    """Adds what sums are made of."""

    def full(self, shape: Any, dtype: torch.dtype, device: torch.device) -> fx.Node:
        """Zeros."""
        return self.call(aten.full.default, [int(size) for size in shape], 0, dtype=dtype, device=device)

    def lookups(self, found: _Sum, index: fx.Node) -> fx.Node:
        """Per lookup the number of the last of the same row."""
        device = found.table.device
        options = {"dtype": torch.int64, "device": device}
        numbers = self.call(prims.iota.default, found.lookups, start=0, step=1, requires_grad=False, **options)
        flat = index if found.index.meta["val"].dim() == 1 else self.call(aten.view.default, index, [found.lookups])
        none = self.full(found.table.shape[:1], torch.int64, device)
        last = self.call(aten.scatter_reduce.two, none, 0, flat, numbers, "amax")
        return self.call(aten.index.Tensor, last, [index])

    def rows(self, found: _Sum, lookup: fx.Node) -> fx.Node:
        """The sums, each in the row of the lookup that stands for it."""
        zeros = self.full((found.lookups, *found.table.shape[1:]), found.table.dtype, found.table.device)
        if found.mask is not None:
            return self.call(_MASKED, zeros, found.mask, [lookup], found.values)
        return self.call(found.node.target, zeros, [lookup], found.values, True)
