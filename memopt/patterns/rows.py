"""What a training program computes row by row from one matrix product on, so that it may run in chunks of rows."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from memopt.graph.rewrite import Refused
from memopt.patterns.column_padding import cuts_columns, pads_columns, pads_of, turns
from memopt.program import InputKind, Phase, Program, is_effectful, is_random, tensors_of
from memopt.torch_compat import pytree

aten = torch.ops.aten
prims = torch.ops.prims

HALVES = (torch.float16, torch.bfloat16)
PRODUCTS = (aten.mm.default, aten.addmm.default)
NLL_FORWARD, NLL_BACKWARD = aten.nll_loss_forward.default, aten.nll_loss_backward.default
_PICKS = {NLL_FORWARD, aten.gather.default}
_VIEWS = {
    aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims,
    aten.alias.default, aten.detach.default,
}  # fmt: skip
_ELEMENTWISE = {aten._to_copy.default, aten.zeros_like.default, aten.full_like.default, aten.ones_like.default}
_ALONG_ROWS = {
    aten.amax.default, aten.amin.default, aten.sum.dim_IntList, aten.mean.dim, aten.logsumexp.default,
    aten._log_softmax.default, aten._softmax.default,
}  # fmt: skip
_SOFTMAX_BACKWARD = {aten._log_softmax_backward_data.default, aten._softmax_backward_data.default}
_FILLED = {aten.full.default, aten.zeros.default, aten.ones.default}


class RowRefused(Refused):
    """Why a region cannot run in chunks, and the node at which that was found."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(reason)
        self.node = node


@dataclasses.dataclass(frozen=True)
class Rows:
    """In a recipe: the rows of a value that belong to the chunk, [rows, ...]; with `turned`, as columns."""

    node: fx.Node
    turned: bool = False


@dataclasses.dataclass(frozen=True)
class Count:
    """In a recipe: the number of rows of the chunk."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to compute one value for a chunk of rows. Nodes in the arguments are taken whole.

    Attributes:
        target: the operator; None when the value is its operand as it stands.
        args, kwargs: its arguments, with `Rows` and `Count` among them.
        summed: whether the results of the chunks are to be added up; else they are rows of the whole value.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    summed: bool = False


@dataclasses.dataclass(frozen=True)
class RowRegion:
    """Part of a training program that may run in chunks of the rows of `product`.

    Attributes:
        product: the matrix product that the region begins with, [rows, columns]; it stays whole where it, or what is as
            large, is returned to the caller: then chunks read its rows.
        rows: how many rows there are.
        nodes: by phase, what is to be computed chunk by chunk, in order of execution. Views of a transposed value and
            items of multiple results are left out.
        recipes: how each of them is computed for a chunk.
        wide: those of them that are as large as the product: they exist in chunks only.
        late: by phase, nodes that stand among the region's but read its results: they have to run after it.
    """

    product: fx.Node
    rows: int
    nodes: dict[Phase, tuple[fx.Node, ...]]
    recipes: dict[fx.Node, Recipe]
    wide: frozenset[fx.Node]
    late: dict[Phase, tuple[fx.Node, ...]]


def products_before_losses(program: Program) -> list[fx.Node]:
    """The forward matrix products from which, by whatever operations, a loss over classes picks one column per row."""
    found: dict[fx.Node, None] = {}
    for pick in program.calls:
        if pick.target in _PICKS and pick.meta.get("phase") is Phase.FORWARD:
            operand = pick.all_input_nodes[0]
            columns = tensors_of(operand)[0].shape[-1:]

            def sources(node: fx.Node, columns: torch.Size = columns) -> list[fx.Node]:
                if node.target in PRODUCTS:
                    return []
                if cuts_columns(node):
                    return node.all_input_nodes
                return [n for n in node.all_input_nodes if any(t.shape[-1:] == columns for t in tensors_of(n))]

            reached = _reach([operand], sources, set())
            found.update(dict.fromkeys(node for node in reached if node.target in PRODUCTS))
    order = {node: index for index, node in enumerate(program.graph.nodes)}
    return sorted(found, key=order.__getitem__)


def find_rows(program: Program, product: fx.Node) -> RowRegion:
    """The region that begins with a forward matrix product [rows, columns] of two rows or more.

    Everything as large as the product that depends on it, and what only serves to compute that, is in the region: in
    forward up to narrow results (one number per row), in backward up to the gradients of the product's operands. What
    the caller is returned of it (logits beside a loss), and what that is computed from, stays as it is.

    Raises:
        RowRefused: the region cannot run in chunks.
    """
    return _Finder(program, product).region()


def lead_of(shape: Sequence[int], rows: int) -> int | None:
    """How many leading dimensions together run over the rows: 2 for [batch, sequence, ...]; None when none do."""
    for count in range(1, len(shape) + 1):
        if math.prod(shape[:count]) == rows:
            return count
    return None


class _Finder:
    def __init__(self, program: Program, product: fx.Node) -> None:
        self.program, self.product = program, product
        self.rows, columns = (int(size) for size in product.meta["val"].shape)
        self.columns = {columns}  # as many as the product has, with padding and without
        given = zip(program.inputs, program.placeholders, strict=True)
        self.tangents = {node for entry, node in given if entry.kind is InputKind.TANGENT}
        self.position = {node: index for index, node in enumerate(program.graph.nodes)}
        self.wide: set[fx.Node] = {product}
        self.narrow: set[fx.Node] = set()  # read wide values, and give less per row, or sums over rows
        self.returned: set[fx.Node] = set()  # wide values of forward that the caller gets
        self.turned: set[fx.Node] = set()  # transposes of wide values
        self.inside: set[fx.Node] = set()

    def _grow(self) -> None:
        """Collect what is as large as the product, and what reads it."""
        work = [self.product]
        while work:
            node = work.pop(0)
            for user in node.users:
                if user.op == "output":
                    if node.meta["phase"] is not Phase.FORWARD:
                        raise RowRefused(node, "a gradient as large as the logits is returned to the caller")
                    self.returned.add(node)
                    continue
                if (cuts_columns(user) or pads_columns(user)) and _nearly_as_wide(user, node):
                    self.columns.add(int(user.meta["val"].shape[-1]))
                if user.target in PRODUCTS or turns(user) or not self._is_wide(user):
                    self.narrow.add(user)
                elif user not in self.wide:
                    self.wide.add(user)
                    work.append(user)
            if node is self.product:
                continue
            for operand in node.all_input_nodes:
                if operand in self.wide or not self._is_wide(operand) or operand in self.tangents:
                    continue
                if operand.op != "call_function" or operand.target in PRODUCTS:
                    raise RowRefused(node, f"it also reads {operand.name}, which is as large as the logits")
                self.wide.add(operand)
                work.append(operand)

    def region(self) -> RowRegion:
        self._grow()
        kept = _reach(self.returned, lambda node: node.all_input_nodes, set())
        self.wide -= kept
        self.narrow -= kept
        self.turned = {node for node in self.narrow if turns(node)}
        for node in self.turned:
            self.narrow |= {user for user in node.users if user.op == "call_function"}
        self.inside = self.wide | (self.narrow - self.turned)
        self.inside |= self._between() - kept
        ordered = sorted(self.inside, key=self.position.__getitem__)
        recipes = {node: self._recipe(node) for node in ordered}
        for node, recipe in recipes.items():
            self._check(node, recipe)
        nodes = {phase: tuple(n for n in ordered if n.meta["phase"] is phase) for phase in Phase}
        late = {phase: self._late(nodes[phase]) for phase in Phase}
        return RowRegion(self.product, self.rows, nodes, recipes, frozenset(self.wide), late)

    def _is_wide(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.ndim < 2 or value.shape[-1] not in self.columns:
            return False
        return math.prod(value.shape[:-1]) == self.rows

    def _between(self) -> set[fx.Node]:
        """Narrow values that are computed from wide ones and needed for wide ones in the same graph of the step."""
        after = _reach(self.narrow, lambda node: node.users, self.wide)
        before = _reach(self.wide, lambda node: node.all_input_nodes, set())
        return (after & before) - self.wide

    def _late(self, nodes: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
        if not nodes:
            return ()
        phase, last = nodes[0].meta["phase"], self.position[nodes[-1]]
        results, late = set(nodes), []
        for node in self.program.calls:
            if self.position[node] > last:
                break
            if node in self.inside or node in self.turned or node.meta["phase"] is not phase:
                continue
            if any(operand in results for operand in node.all_input_nodes):
                results.add(node)
                if node.target is operator.getitem and node.args[0] in self.inside:
                    continue  # an item of the region's own result: replaced with it
                if is_random(node) or is_effectful(node):
                    raise RowRefused(node, "it would have to run later than it does")
                late.append(node)
        return tuple(late)

    # -- recipes -------------------------------------------------------------------------------------------------

    def _check(self, node: fx.Node, recipe: Recipe) -> None:
        """Operands taken whole must not come from the region; those taken by rows must have rows that can be cut."""
        for leaf in pytree.tree_leaves((recipe.args, recipe.kwargs)):
            if isinstance(leaf, fx.Node) and (leaf in self.inside or leaf in self.turned):
                raise RowRefused(node, f"it mixes the rows of {leaf.name}")
            if isinstance(leaf, Rows):
                if leaf.node in self.inside:
                    if self._recipe(leaf.node).summed:
                        raise RowRefused(node, f"it reads {leaf.node.name}, a sum over rows")
                elif not _may_be_cut(leaf.node, self.rows):
                    raise RowRefused(node, f"the rows of {leaf.node.name} do not lie one after the other")

    def _recipe(self, node: fx.Node) -> Recipe:
        """How the node is computed for some rows. Raises RowRefused where it is not known to work row by row."""
        target, args = node.target, node.args
        if target is NLL_FORWARD:
            log_probabilities, labels, weight, _, ignored = args
            return Recipe(target, (self._row(node, log_probabilities), self._row(node, labels), weight, 0, ignored))
        if target in PRODUCTS:
            return self._product(node)
        if target is aten.sum.dim_IntList and self._sums_rows(node):
            kwargs = dict(node.kwargs)
            if node.meta["val"].dtype in HALVES:
                kwargs["dtype"] = torch.float32  # rounded once, when all chunks are added up
            return Recipe(target, (self._row(node, args[0]), [0], *args[2:]), kwargs, summed=True)
        if is_random(node) or is_effectful(node) or len(tensors_of(node)) != 1:
            raise RowRefused(node, f"{target} is not known to work row by row")
        lead = lead_of(node.meta["val"].shape, self.rows)
        if lead is None:
            raise RowRefused(node, f"{target} reads the logits, or what is as large, but gives no value per row")
        rest = list(node.meta["val"].shape[lead:])
        if cuts_columns(node):
            return Recipe(target, (self._row(node, args[0]), len(rest), *args[2:]))
        if pads_columns(node):
            return Recipe(target, (self._row(node, args[0]), pads_of(node)[:2], *args[2:]))
        if target in _VIEWS:
            operand = self._row(node, args[0])
            same = rest == list(args[0].meta["val"].shape[lead_of(args[0].meta["val"].shape, self.rows) :])  # type: ignore[union-attr]
            return Recipe(None, (operand,)) if same else Recipe(aten.view.default, (operand, [Count(), *rest]))
        if target is aten.expand.default:
            return Recipe(target, (self._aligned(node, args[0], lead), [Count(), *rest]))
        if target in _FILLED:
            return Recipe(target, ([Count(), *rest], *args[1:]), dict(node.kwargs))
        if target is aten.new_zeros.default:  # of its operand it takes no value
            value = node.meta["val"]
            return Recipe(aten.full.default, ([Count(), *rest], 0), {"dtype": value.dtype, "device": value.device})
        if target is NLL_BACKWARD:
            per_row = args[0].meta["val"].ndim > 0  # type: ignore[union-attr]
            gradient = self._row(node, args[0]) if per_row else args[0]
            return Recipe(target, (gradient, self._row(node, args[1]), self._row(node, args[2]), *args[3:]))
        if target in _ALONG_ROWS:
            return Recipe(
                target, (self._row(node, args[0]), self._inner(node, args[1], 0), *args[2:]), dict(node.kwargs)
            )
        if target in _SOFTMAX_BACKWARD:
            operands = [self._row(node, operand) for operand in args[:2]]
            return Recipe(target, (*operands, self._inner(node, args[2], 0), *args[3:]), dict(node.kwargs))
        if target is aten.gather.default:
            return Recipe(target, (self._row(node, args[0]), self._inner(node, args[1], 0), self._row(node, args[2])))
        if target is aten.scatter.value or target is aten.scatter_add.default:
            picked = self._row(node, args[0]), self._inner(node, args[1], 0), self._row(node, args[2])
            added = args[3] if target is aten.scatter.value else self._row(node, args[3])
            return Recipe(target, (*picked, added))
        if target in _ELEMENTWISE or torch.Tag.pointwise in getattr(target, "tags", ()):
            aligned: Any = fx.map_arg((args, node.kwargs), lambda operand: self._aligned(node, operand, lead))
            return Recipe(target, *aligned)
        raise RowRefused(node, f"{target} is not known to work row by row")

    def _product(self, node: fx.Node) -> Recipe:
        """The product itself, or the gradient of its left operand (rows times a matrix) or of its right one (a sum)."""
        target, args = node.target, node.args
        if node.kwargs:
            raise RowRefused(node, "it scales its operands")
        left, right = args[-2:]
        bias = args[:-2]
        if node is self.product or (left in self.wide and right not in self.wide):
            if bias and bias[0].meta["val"].shape[0] == self.rows and bias[0].meta["val"].ndim == 2:  # type: ignore[union-attr]
                raise RowRefused(node, "its addend has rows of its own")
            return Recipe(target, (*bias, self._row(node, left), right))
        if bias or not turns(left):
            raise RowRefused(node, f"{target} of the logits, or of what is as large, mixes their rows")
        return Recipe(target, (self._row(node, left.args[0], turned=True), self._row(node, right)), summed=True)  # type: ignore[union-attr]

    def _sums_rows(self, node: fx.Node) -> bool:
        shape = node.args[0].meta["val"].shape  # type: ignore[union-attr]
        lead = lead_of(shape, self.rows)
        dims = {dim % len(shape) for dim in node.args[1] or ()}  # type: ignore[union-attr,operator]
        return lead is not None and dims == set(range(lead))

    def _row(self, node: fx.Node, operand: Any, *, turned: bool = False) -> Rows:
        shape = operand.meta["val"].shape
        if lead_of(shape, self.rows) is None:
            raise RowRefused(node, f"{operand.name} has no {self.rows} rows")
        return Rows(operand, turned)

    def _inner(self, node: fx.Node, dims: Any, operand: int) -> Any:
        """Dimensions of an operand that lie within a row, as counted in a chunk."""
        value = node.args[operand].meta["val"]  # type: ignore[union-attr]
        lead = lead_of(value.shape, self.rows) or 0
        found = [dim % value.ndim for dim in ([dims] if isinstance(dims, int) else dims or ())]
        if not found or any(dim < lead for dim in found):
            raise RowRefused(node, f"{node.target} runs over several rows")
        shifted = [dim - lead + 1 for dim in found]
        return shifted[0] if isinstance(dims, int) else shifted

    def _aligned(self, node: fx.Node, operand: Any, lead: int) -> Any:
        """An operand that is broadcast to the node's shape: by rows, or whole where it is the same for all rows."""
        shape, own = node.meta["val"].shape, operand.meta["val"].shape
        if len(own) == len(shape) and own[:lead] == shape[:lead]:
            return Rows(operand)
        if len(own) <= len(shape) - lead or (lead == 1 and len(own) == len(shape) and own[0] == 1):
            return operand
        raise RowRefused(node, f"{operand.name} is not laid out by rows")


def _reach(starts: Iterable[fx.Node], step: Callable[[fx.Node], Iterable[fx.Node]], stop: set[fx.Node]) -> set[fx.Node]:
    """What can be reached from the nodes within one graph of the step, themselves included; not on from `stop`."""
    found: set[fx.Node] = set()
    work = list(starts)
    while work:
        node = work.pop()
        if node in found or node.op != "call_function":
            continue
        found.add(node)
        if node not in stop:
            work.extend(other for other in step(node) if other.meta.get("phase") is node.meta["phase"])
    return found


def _nearly_as_wide(node: fx.Node, other: fx.Node) -> bool:
    narrow, wide = sorted(int(item.meta["val"].shape[-1]) for item in (node, other))
    return 2 * narrow > wide


def _may_be_cut(node: fx.Node, rows: int) -> bool:
    value = node.meta["val"]
    return lead_of(value.shape, rows) == 1 or bool(value.is_contiguous())
