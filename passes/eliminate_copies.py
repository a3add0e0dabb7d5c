"""EliminateCopies: remove copies that nothing needs, and views that change nothing."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, ClassVar

import torch
from torch import fx

from memopt.graph.propagation import fake_mode
from memopt.graph.rewrite import erase_unused
from memopt.memory.sharing import Sharing
from memopt.pass_manager import Change, Pass, PassResult, Refusal
from memopt.program import Program
from memopt.torch_compat.fake_tensors import no_fake_mode

aten = torch.ops.aten

VIEWS = frozenset({
    aten.alias.default, aten.detach.default, aten.lift_fresh.default, aten.view.default, aten._unsafe_view.default,
    aten._reshape_alias.default, aten.expand.default, aten.permute.default, aten.transpose.int, aten.t.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default, aten.slice.Tensor,
    aten.select.int, aten.as_strided.default,
})  # fmt: skip
SPLITS = frozenset({aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int})
RESHAPES = frozenset({aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default})
PERMUTES = frozenset({aten.permute.default, aten.transpose.int, aten.t.default})
STRIDE_BLIND = PERMUTES | {
    aten.expand.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default,
    aten.slice.Tensor, aten.select.int,
}  # fmt: skip
"""Views that exist for operands of any strides."""

COPIES = frozenset({aten.clone.default, aten._to_copy.default, aten.lift_fresh_copy.default})
UNITS: dict[Any, int] = {
    aten.mul.Tensor: 1, aten.mul.Scalar: 1, aten.div.Tensor: 1, aten.div.Scalar: 1,
    aten.add.Tensor: 0, aten.add.Scalar: 0, aten.sub.Tensor: 0, aten.sub.Scalar: 0,
}  # fmt: skip
"""Operators and the literal second operand that makes them copies."""


class EliminateCopies(Pass):
    """Read the original where a copy of it was read, and compose views.

    Algebra: a copy holds the bits of its operand, and a view is its operand's memory under a shape, strides and an
    offset. A node is replaced only by one of the same shape, strides, offset, dtype and device, so every reader runs
    the same kernel on the same bits and every layout after it stays. (Case 3 alone changes strides, on a path that
    ends in copies of a fixed layout.) Numbers are bitwise equal; of a NaN, that it is one.

    Cases:
        1. clone (dropout in eval mode), a cast to the same dtype and device, copy(_, x), a cat of one piece,
           x·1, x/1, and for integers x+0, x-0.
        2. A widening cast followed by the cast back: float16 → float32 → float16.
        3. A copy into other strides that only copies into a fixed memory format read, directly or through views.
        4. A view that equals its operand or an earlier view of the same tensor: detach, alias, a full slice, a split
           into one piece, expand and view to the same shape, permutations that cancel, squeeze after unsqueeze.
        5. A view of a view that nothing else reads: reshapes, permutations and expansions become one.

    Memory: without the copy the original is read longer. Where it lives in a storage that is larger than the copy, and
    not alive as long anyway, the copy stays: it lets the larger storage go.

    Refusals:
        - A copy with strides or an offset of its own: readers could sum in another order, or need such strides.
        - A copy that reaches the caller, when it would share memory with an input, with another output, or with a
          tensor that backward reads: the caller may write to it. Likewise a tensor that backward reads, when it would
          share memory with an input or an output.
        - A view that is itself an output, where it would become an input or another output: the caller gets a tensor
          object of its own. A detach whose result, or a view of it, is an output: autograd would take what is returned
          for a view of the tensor that requires a gradient.
        - A copy that would keep a larger storage alive; one that a higher-order operator reads.
        - x+0 in floating point: -0.0 + 0 is 0.0.
    """

    name: ClassVar[str] = "eliminate_copies"

    def run(self, program: Program) -> PassResult:
        """Return the program without needless copies and views; one change per node removed."""
        new = program.copy()
        changes = _Sweep(new).drop_restrided()
        if changes:
            new = new.finish()
        sweep = _Sweep(new)
        changes += sweep.drop_equal()
        return PassResult.of(program, new, _settled(changes, new.graph), sweep.refusals)


class _Sweep:
    """One walk over a graph that is being edited, first node to last."""

    def __init__(self, program: Program) -> None:
        self.graph = program.graph
        self.mode = fake_mode(program.graph_module)
        self.sharing = Sharing(program)
        self.outputs = {value for value in program.output_nodes if isinstance(value, fx.Node)}
        self.changes: list[Change] = []
        self.refusals: list[Refusal] = []
        self.origin: dict[fx.Node, fx.Node] = {}  # the node that made the memory that a chain of views shows
        self.known: dict[Any, fx.Node] = {}
        self.erased: set[str] = set()

    def drop_restrided(self) -> list[Change]:
        """Case 3: copies whose strides nothing sees."""
        for node in list(self.graph.nodes):
            if node.target not in COPIES or not _strides_unseen(node):
                continue
            source = node.args[0]
            if _kind(source) == _kind(node) and self.sharing.reason_against(node, source) is None:
                self.sharing.merge(node, source)
                self._replace(node, source, f"nothing sees the strides of {node.name}, a copy of {source.name}")
        return self.changes

    def drop_equal(self) -> list[Change]:
        """All other cases."""
        for node in list(self.graph.nodes):
            if node.name in self.erased or node.op == "output":
                continue
            self.origin[node] = node
            if node.target is aten.detach.default and self._is_shown(node):
                reason = "what is returned of it requires no gradient, unlike what it was detached from"
                self.refusals.append(Refusal(node.name, reason))
                continue
            if node.target in SPLITS or node.target in VIEWS or _is_piece(node):
                self.origin[node] = self.origin[node.all_input_nodes[0]]
            if node.target in VIEWS or _is_piece(node):
                self._visit_view(node)
            elif node.op == "call_function":
                self._visit_copy(node)
            if node.name not in self.erased:
                self._remember(node)
        return self.changes

    # -- copies ---------------------------------------------------------------------------------------------------

    def _visit_copy(self, node: fx.Node) -> None:
        source = _copied(node)
        if source is None or _kind(source) != _kind(node):
            return
        reason = None
        if UNITS.get(node.target) == 0 and node.meta["val"].is_floating_point():
            reason = "adding 0 turns -0.0 into 0.0"
        elif _layout(source) != _layout(node):
            mine, theirs = node.meta["val"], source.meta["val"]
            reason = (
                f"it copies strides {list(theirs.stride())}, offset {theirs.storage_offset()} into strides "
                f"{list(mine.stride())}, which its readers or the caller see"
            )
        reason = reason or self.sharing.reason_against(node, source)
        if reason is not None:
            self.refusals.append(Refusal(node.name, reason))
            return
        self.sharing.merge(node, source)
        self._replace(node, source, f"{node.name} copies {source.name}")

    # -- views ----------------------------------------------------------------------------------------------------

    def _visit_view(self, node: fx.Node) -> None:
        equal = self._equal(node)
        if equal is None:
            self._compose(node)
        elif node in self.outputs and (equal in self.outputs or equal.op == "placeholder"):
            self.refusals.append(Refusal(node.name, f"equals {equal.name}, but is returned as a tensor of its own"))
        else:
            self._replace(node, equal, f"{node.name} shows the same tensor as {equal.name}")

    def _is_shown(self, node: fx.Node) -> bool:
        """Whether the node or a view of it is an output."""
        views = (user for user in node.users if user.target in VIEWS or user.target in SPLITS or _is_piece(user))
        return node in self.outputs or any(self._is_shown(view) for view in views)

    def _compose(self, node: fx.Node) -> None:
        inner = node.all_input_nodes[0]
        if inner.target not in VIEWS or len(inner.users) != 1:
            return
        if inner.target is aten.detach.default and self._is_shown(inner):
            return
        base = inner.all_input_nodes[0]
        target, literal = _composed(node, inner)
        if target is None:
            return
        try:
            with no_fake_mode():  # a fake tensor grants views of a strided one that there are none of
                target(_without_data(base.meta["val"]), literal)
            with self.mode:
                found = target(base.meta["val"], literal)
        except (RuntimeError, ValueError):  # no such view of the base exists
            return
        if _layout_of(found) != _layout(node):
            return
        node.target, node.args, node.kwargs = target, (base, literal), {}
        self.graph.erase_node(inner)
        self.erased.add(inner.name)
        summary = f"{node.name} views {base.name} directly, not through {inner.name}"
        self.changes.append(Change(summary, (inner.name, node.name), (node.name,)))

    # -- both -----------------------------------------------------------------------------------------------------

    def _remember(self, node: fx.Node) -> None:
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return
        origin = self.origin[node]
        phase = None if origin is node else node.meta.get("phase")
        self.known[origin, _layout(node), phase] = node

    def _equal(self, node: fx.Node) -> fx.Node | None:
        """The node's origin, or a view of it in the same graph of the step, if it has the node's layout."""
        for phase in (None, node.meta.get("phase")):
            found = self.known.get((self.origin[node], _layout(node), phase))
            if found is not None and found.name not in self.erased:
                return found
        return None

    def _replace(self, node: fx.Node, source: fx.Node, summary: str) -> None:
        operands = node.all_input_nodes
        if node in self.outputs:
            self.outputs.add(source)
        node.replace_all_uses_with(source)
        self.graph.erase_node(node)
        gone = [node.name, *erase_unused(self.graph, operands)]
        self.erased.update(gone)
        self.changes.append(Change(summary, tuple(gone[::-1]), (source.name,)))


def _settled(changes: list[Change], graph: fx.Graph) -> tuple[Change, ...]:
    """The changes, where one replaced what an earlier one had put in place: `after` names what stands there at last."""
    left = {node.name for node in graph.nodes}
    settled = []
    stands: dict[str, tuple[str, ...]] = {}
    for change in reversed(changes):
        after = tuple(stands.get(name, ()) if name not in left else (name,) for name in change.after)
        flat = tuple(name for names in after for name in names)
        stands.update(dict.fromkeys(change.before, flat))
        settled.append(dataclasses.replace(change, after=flat))
    return tuple(settled[::-1])


# -- layouts ----------------------------------------------------------------------------------------------------------


def _kind(node: Any) -> tuple[Any, ...]:
    """What a copy must have in common with its operand for its values to be the same; empty when it is no tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return _layout_of(value)[:5] if isinstance(value, torch.Tensor) else ()


def _layout(node: fx.Node) -> tuple[Any, ...]:
    return _layout_of(node.meta["val"])


def _without_data(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")


def _layout_of(value: torch.Tensor) -> tuple[Any, ...]:
    if value.layout is not torch.strided:
        return (id(value),)
    meaning = (tuple(value.shape), value.dtype, value.device, value.is_conj(), value.is_neg())
    return (*meaning, tuple(value.stride()), value.storage_offset())


# -- which nodes are copies and views ---------------------------------------------------------------------------------


def _copied(node: fx.Node) -> fx.Node | None:
    """The node whose values this one repeats, if it is such a node."""
    source: Any = None
    if node.target in COPIES and not node.kwargs.get("pin_memory"):
        source = node.args[0]
        if not isinstance(source, fx.Node):  # a number, within vmap
            return None
        widened: Any = source.args[0] if source.target is aten._to_copy.default else None
        if (
            isinstance(widened, fx.Node)
            and _kind(widened) == _kind(node) != _kind(source)
            and _widens(widened.meta["val"], source.meta["val"])
        ):
            source = widened
    elif node.target is aten.copy.default:
        source = node.args[1]
    elif node.target is aten.cat.default and len(node.args[0]) == 1:  # type: ignore[arg-type]
        source = node.args[0][0]  # type: ignore[index]
    elif node.target in UNITS and type(node.args[1]) in (int, float) and node.args[1] == UNITS[node.target]:
        source = None if node.meta["val"].is_complex() else node.args[0]
    return source if isinstance(source, fx.Node) else None


_MANTISSA = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}
_INTEGERS = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


def _widens(narrow: torch.Tensor, wide: torch.Tensor) -> bool:
    """Whether every value of the first dtype is one of the second."""
    a, b = narrow.dtype, wide.dtype
    if narrow.device != wide.device or a not in _INTEGERS | _MANTISSA.keys() or b not in _INTEGERS | _MANTISSA.keys():
        return False
    if a in _INTEGERS and b in _MANTISSA:
        return a is torch.bool or torch.iinfo(a).bits <= _MANTISSA[b]
    return torch.promote_types(a, b) is b


def _is_piece(node: fx.Node) -> bool:
    return node.target is operator.getitem and node.all_input_nodes[0].target in SPLITS


def _strides_unseen(node: fx.Node) -> bool:
    """Whether all that reads the node, through views that any strides allow, copies it into a fixed memory format."""
    work = list(node.users)
    while work:
        user = work.pop()
        if user.target in STRIDE_BLIND and user.users:
            work.extend(user.users)
        elif user.target not in COPIES or user.kwargs.get("memory_format") not in _FIXED_FORMATS:
            return False
    return bool(node.users)


_FIXED_FORMATS = frozenset({torch.contiguous_format, torch.channels_last, torch.channels_last_3d})


# -- composition ------------------------------------------------------------------------------------------------------


def _composed(node: fx.Node, inner: fx.Node) -> tuple[Any, list[int]]:
    """The one view, operator and literal, that could stand for `node` of `inner`; (None, []) when there is none."""
    shape = list(node.meta["val"].shape)
    if node.target in RESHAPES:
        return aten.view.default, shape
    if node.target is aten.expand.default and inner.target is aten.expand.default:
        return aten.expand.default, shape
    if node.target in PERMUTES and inner.target in PERMUTES:
        first = _dims(inner)
        return aten.permute.default, [first[dim] for dim in _dims(node)]
    return None, []


def _dims(node: fx.Node) -> list[int]:
    """The permutation that the node applies: which dimension of its operand each of its own is."""
    rank = node.meta["val"].dim()
    if node.target is aten.permute.default:
        return [dim % rank for dim in node.args[1]]  # type: ignore[union-attr]
    dims = list(range(rank))
    if rank > 1:
        i, j = (0, 1) if node.target is aten.t.default else (node.args[1], node.args[2])
        dims[i], dims[j] = dims[j], dims[i]  # type: ignore[index]
    return dims
