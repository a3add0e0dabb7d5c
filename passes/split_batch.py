"""SplitBatch: run stretches of a training step around heavy convolutions on some samples of the batch at a time."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import fx

from memopt.graph.rewrite import Refused, forget_inplace, storages
from memopt.memory.cost.scratch import workspace_bytes
from memopt.memory.timeline import timeline
from memopt.pass_manager import Change, Pass, PassResult, Refusal
from memopt.passes.chunk_batch import bounds, seen_by_the_caller
from memopt.patterns.batch import NO_BATCH, Batched, State, Summed, batch_of
from memopt.patterns.batch_stretches import CONVOLUTIONS, FILLED, Span, Spans, find_spans
from memopt.patterns.elements import shape
from memopt.program import Phase, Program, ProgramError, is_any_view, tensors_of

aten = torch.ops.aten
_CONVERT = torch.ops.prims.convert_element_type.default
_HALVES = (torch.float16, torch.bfloat16)
_PARTS = 4
_SHARE = 1 / 8  # of the peak of a step that recomputes nothing: what the greediest convolution needs, to be split
_SMALL = 2**22  # bytes of a sum up to which each part's is held until all are there: fewer calls add them up
_LEAST_BYTES = 2**20  # what a part's heaviest operation needs: calls of less take no less time than whole ones


class SplitBatch(Pass):
    """Run the operations around the heaviest convolutions on parts of the batch, one part after the other.

    Algebra: a convolution, and what is computed element by element or plane by plane, gives each sample from that
    sample: f([a; b]) = [f(a); f(b)]; so does the gradient of its input, and those of weight and bias are sums over the
    samples: dW([a; b]) = dW(a) + dW(b). So a stretch of such operations may run on one part of the batch after the
    other: what one operation needs by itself (operands, results, cuDNN's workspace), which no recomputation lowers, is
    divided by the number of parts, and what is made and used up within the stretch exists for one part at a time.

    Cases:
        1. Stretches of either graph of the step, as long as operators allow (`patterns.batch_gradients` proves it one
           by one), from the first operation to the last that needs an eighth of what the greediest one does.
        2. A value that stretches alone read, of backward too, is never put together: it stays in parts, each of which
           is kept or recomputed for itself.
        3. Gradients of weights, and what else sums over the batch, are added up part by part; those of half precision
           in float32, rounded once. What is made of them runs after the stretch.
        4. A part that is a small window of a larger value, and is read behind the stretch, is copied out of it.
        5. A batch that is no multiple of the number of parts: the last parts are one sample smaller.

    Numbers: the same operators on smaller tensors, sums in another order: hence the tolerance. Nothing random is in a
    stretch, nor is it moved.

    Refusals: stretches end, with the reason, at operators that mix samples (a batch norm in training, a loss's mean),
    draw random numbers, or are not known. Nothing is split where the greediest convolution is small, or needs little of
    what the step holds at its peak (then recomputation lowers that), where a batch cannot be told, or where a result
    for the caller would be laid out otherwise. Inference programs are returned as they are (see `chunk_batch`), and
    programs without convolutions.
    """

    name: ClassVar[str] = "split_batch"
    tolerance: ClassVar[float] = 4.0
    lowers_floor: ClassVar[bool] = True

    def __init__(self, parts: int = _PARTS, *, least_bytes: int = _LEAST_BYTES) -> None:
        """Set the number of parts.

        Args:
            parts: how many; no more than samples are made.
            least_bytes: what the greediest operation must need for each part, else nothing is split.

        Raises:
            ValueError: fewer than two parts.
        """
        if parts < 2:
            raise ValueError(f"parts is {parts}: at least 2 are needed")
        self.parts, self.least_bytes = parts, least_bytes

    @property
    def key(self) -> str:
        """With the least that a part is to need, where that is not the usual one."""
        return self.name if self.least_bytes == _LEAST_BYTES else f"{self.name}:{self.least_bytes}"

    @property
    def deeper(self) -> Pass | None:
        """Convolutions of any size in parts, which take more time: where a step does not fit else."""
        return SplitBatch(self.parts, least_bytes=1) if self.least_bytes > 1 else None

    def run(self, program: Program) -> PassResult:
        """Return the program with stretches in parts, one change for each; or the program itself and the reasons."""
        heavy = [node for node in program.calls if node.target in CONVOLUTIONS]
        if not program.training or not heavy:
            return PassResult(program)
        first = heavy[0].name
        size = batch_of(program)
        if not size:
            return PassResult(program, (), (Refusal(first, NO_BATCH),))
        own = {node.name: own_bytes(node) for node in program.calls}
        most = max(own[node.name] for node in heavy)
        if most < self.least_bytes * min(self.parts, size):
            reason = f"the greediest convolution needs {most} bytes: parts of it would take as long as the whole"
            return PassResult(program, (), (Refusal(first, reason),))
        peak = timeline(program).peak_bytes
        if most < peak * _SHARE:
            reason = f"the greediest convolution needs {most} of {peak} bytes at the peak: recomputing lowers the rest"
            return PassResult(program, (), (Refusal(first, reason),))
        new = program.copy()
        _take_apart_at_once(new.graph)
        found = find_spans(new, size, {node: own[node.name] for node in new.calls})
        refusals = tuple(Refusal(node.name, f"not in parts: {reason}") for node, reason in found.reasons.items())
        if not found.spans:
            return PassResult(program, (), refusals)
        try:
            return PassResult(*_split(program, new, found, self.parts), refusals)
        except Refused as error:
            node, reason = error.args
            return PassResult(program, (), (Refusal(node, reason), *refusals))


def own_bytes(node: fx.Node) -> int:
    """Bytes that one operation needs whatever else is kept: what it reads, what it makes, its workspace (estimated)."""
    if node.target is operator.getitem or is_any_view(node):
        return 0
    read: dict[int, int] = {}
    for operand in (*node.all_input_nodes, node):
        read.update(storages(operand))
    return sum(read.values()) + workspace_bytes(node)


def _take_apart_at_once(graph: fx.Graph) -> None:
    """Items of results behind what makes these: an engine's order may have them stand behind the end of a stretch."""
    last: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        made_by = node.args[0] if node.target is operator.getitem else None
        if isinstance(made_by, fx.Node) and made_by.meta.get("phase") is node.meta.get("phase"):
            last.get(made_by, made_by).append(node)
            last[made_by] = node


def _split(program: Program, new: Program, found: Spans, parts: int) -> tuple[Program, tuple[Change, ...]]:
    made = _Parts(new, found, bounds(found.size, parts))
    changes = tuple(made.build(span) for span in found.spans)
    made.erase()
    forget_inplace(new.graph)
    first = found.spans[0].members[0].name
    try:
        finished = new.finish()
    except (ProgramError, RuntimeError, ValueError) as error:
        raise Refused(first, f"a part of it cannot be run: {error}") from error
    put_together = [node for node in finished.calls if node.name in made.laid_out]
    moved = [node for node in put_together if node.meta["val"].stride() != made.laid_out[node.name]]
    if any(_is_counted_through(node) for node in moved):
        raise Refused(first, "its result would be laid out otherwise, and as_strided reads it")
    if seen_by_the_caller(finished) != seen_by_the_caller(program):
        raise Refused(first, "a result would be laid out otherwise, or share memory with others than before")
    return finished, changes


def _is_counted_through(node: fx.Node) -> bool:
    """Whether an operator counts through the storage of the value, whatever its strides."""
    return any(
        user.target is aten.as_strided.default or (is_any_view(user) and _is_counted_through(user))
        for user in node.users
    )


class _Parts:
    """Replaces the members of spans by copies for each part, in the graph of a program that is being edited."""

    def __init__(self, program: Program, found: Spans, parts: Sequence[tuple[int, int]]) -> None:
        self.graph, self.found, self.parts = program.graph, found, parts
        self.rules = {node: rule for span in found.spans for node, rule in span.rules.items()}
        self.pieces: dict[fx.Node, list[fx.Node]] = {}  # by member, its value for each part
        self.joined: dict[fx.Node, fx.Node] = {}
        self.laid_out: dict[str, tuple[int, ...]] = {}
        self.cursor = found.spans[0].members[0]

    def build(self, span: Span) -> Change:
        """Put a span's copies behind it, and what the rest reads behind these."""
        members = set(span.members)
        for node in span.early:
            span.members[0].prepend(node)
        self.cursor = span.members[-1]
        pieces: dict[fx.Node, list[fx.Node]] = {node: [] for node in span.members}
        sums: dict[fx.Node, list[fx.Node]] = {}
        for index, (start, stop) in enumerate(self.parts):
            copies: dict[fx.Node, fx.Node] = {}
            slices: dict[tuple[fx.Node, Batched], fx.Node] = {}
            for node in span.members:
                copies[node] = made = self._copy(node, copies, slices, index, start, stop)
                if isinstance(self.rules[node].state, Summed):
                    sums[node] = self._added(node, sums.get(node, []), made)
                else:
                    pieces[node].append(self._kept(node, made) if self._is_window(node, members) else made)
        after = []
        for node in span.members:
            outside = [user for user in node.users if user not in members]
            if not outside:
                continue
            if node in sums:
                after.append(self._replace(node, self._total(node, sums[node])))
                continue
            self.pieces[node] = pieces[node]
            if not all(self._reads_pieces(user, node) for user in outside):
                self.joined[node] = whole = self._put_together(node, pieces[node])
                after.append(self._replace(node, whole))
        for node in span.late:
            self.cursor.append(node)
            self.cursor = node
        before = tuple(node.name for node in span.members)
        summary = f"{len(before)} operations, {before[0]} to {before[-1]}, in {len(self.parts)} parts of the batch"
        return Change(f"{summary} of {self.found.size}", before, tuple(node.name for node in after))

    def erase(self) -> None:
        """Erase what the copies stand for."""
        for span in reversed(self.found.spans):
            for node in reversed(span.members):
                self.graph.erase_node(node)
        for node in [node for node in self.graph.nodes if node.target is FILLED and not node.users]:
            self.graph.erase_node(node)

    # -- one part ------------------------------------------------------------------------------------------------

    def _copy(
        self,
        node: fx.Node,
        copies: Mapping[fx.Node, fx.Node],
        slices: dict[tuple[fx.Node, Batched], fx.Node],
        index: int,
        start: int,
        stop: int,
    ) -> fx.Node:
        """The node for the part's samples, behind the slices that it reads."""
        rule = self.rules[node]

        def operand(value: fx.Node) -> fx.Node:
            if value in copies:
                return copies[value]
            state = rule.slices.get(value, self.found.outside[value])
            if state is None:
                return self.joined.get(value, value)
            assert isinstance(state, Batched)
            if value in self.pieces and self.rules[value].state == state:
                return self.pieces[value][index]
            if (value, state) not in slices:
                span = (start * state.inner, stop * state.inner)
                slices[value, state] = self._rows(node, value, state.dim, span)
            return slices[value, state]

        args, kwargs = fx.map_arg((node.args, node.kwargs), operand)
        changed = list(args)
        for position, argument in (rule.resize(stop - start) if rule.resize is not None else {}).items():
            changed[position] = argument
        return self._call(node, node.target, tuple(changed), "part", kwargs)

    def _rows(self, node: fx.Node, value: fx.Node, dim: int, span: tuple[int, int]) -> fx.Node:
        """For a node, these entries of a value along a dimension."""
        if value.target is FILLED:
            sizes = list(shape(value))
            sizes[dim] = span[1] - span[0]
            return self._call(node, FILLED, (sizes, value.args[1]), "filled", value.kwargs)
        return self._call(node, aten.slice.Tensor, (self.joined.get(value, value), dim, *span), "rows")

    def _call(
        self, node: fx.Node, target: Any, args: Any, suffix: str, kwargs: Mapping[str, Any] | None = None
    ) -> fx.Node:
        with self.graph.inserting_after(self.cursor):
            made = self.graph.create_node(
                "call_function", target, tuple(args), dict(kwargs or {}), name=f"{node.name}_{suffix}"
            )
        made.meta = {key: value for key, value in node.meta.items() if key not in ("val", "inplace")}
        self.cursor = made
        return made

    def _is_window(self, node: fx.Node, members: set[fx.Node]) -> bool:
        """Whether backward holds on to the value for others than its span, and to as much again that nobody reads."""
        if node.meta["phase"] is not Phase.BACKWARD or not is_any_view(node) or members.issuperset(node.users):
            return False
        (value,) = tensors_of(node)
        return int(value.untyped_storage().nbytes()) >= 2 * value.numel() * value.element_size()

    def _kept(self, node: fx.Node, made: fx.Node) -> fx.Node:
        return self._call(node, aten.clone.default, (made,), "kept")

    def _added(self, node: fx.Node, before: list[fx.Node], made: fx.Node) -> list[fx.Node]:
        """The sums so far: each part's for itself where that is little, else one, in float32 at least."""
        value = node.meta["val"]
        if value.is_contiguous() and value.numel() * value.element_size() <= _SMALL:
            return [*before, made]
        if before:
            return [self._call(node, aten.add.Tensor, (before[0], made), "sum")]
        return [made if value.dtype not in _HALVES else self._call(node, _CONVERT, (made, torch.float32), "wide")]

    # -- all parts -----------------------------------------------------------------------------------------------

    def _total(self, node: fx.Node, sums: Sequence[fx.Node]) -> fx.Node:
        """The sum over all parts, rounded once."""
        value = node.meta["val"]
        if len(sums) == 1:
            return self._call(node, _CONVERT, (sums[0], value.dtype), "rounded") if value.dtype in _HALVES else sums[0]
        if len(sums) == 2:
            return self._call(node, aten.add.Tensor, tuple(sums), "sum")
        rows = self._call(node, aten.cat.default, (list(sums),), "sums")
        every = self._call(node, aten.view.default, (rows, [len(sums), *value.shape]), "each")
        return self._call(node, aten.sum.dim_IntList, (every, [0]), "sum")

    def _reads_pieces(self, user: fx.Node, node: fx.Node) -> bool:
        """Whether the user is of another span, and takes the value in the parts in which it is."""
        rule = self.rules.get(user)
        wanted: State = None if rule is None else rule.slices.get(node, self.found.outside[node])
        return wanted is not None and wanted == self.rules[node].state

    def _put_together(self, node: fx.Node, pieces: Sequence[fx.Node]) -> fx.Node:
        """The parts' values put together, laid out as the value was."""
        state, value = self.rules[node].state, node.meta["val"]
        assert isinstance(state, Batched)
        order = sorted(range(value.dim()), key=lambda dim: (-value.stride(dim), dim))
        if order == sorted(order):
            whole = self._call(node, aten.cat.default, (list(pieces), state.dim), "whole")
        else:
            turned = [self._call(node, aten.permute.default, (piece, order), "turned") for piece in pieces]
            flat = self._call(node, aten.cat.default, (turned, order.index(state.dim)), "flat")
            back = [order.index(dim) for dim in range(value.dim())]
            whole = self._call(node, aten.permute.default, (flat, back), "whole")
        self.laid_out[whole.name] = tuple(value.stride())
        return whole

    def _replace(self, node: fx.Node, by: fx.Node) -> fx.Node:
        node.replace_all_uses_with(by, delete_user_cb=lambda user: user not in self.rules)
        return by
