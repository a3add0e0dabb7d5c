"""ChunkBatch: run a program, or stretches of it, on some samples of the batch at a time."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import fx

from memopt.graph.rewrite import Refused, forget_inplace, storages
from memopt.pass_manager import Change, Pass, PassResult, Refusal
from memopt.patterns.batch import Batch, Batched, NotBatched, find_batch
from memopt.patterns.batch_views import same_entries
from memopt.patterns.chunks import Chunk, chunk_of, mark
from memopt.program import Program, ProgramError, tensors_of
from memopt.solve.chunks import Stretch

aten = torch.ops.aten

_SEEN = "a result would be laid out otherwise, or share memory with others than before"


class ChunkBatch(Pass):
    """Compute the samples of the batch in chunks, one chunk after the other, and put their results together.

    Algebra: where every operator's result for a sample depends on that sample and on values that all samples share
    (`patterns.batch` proves it, operator by operator), f([a; b]) = [f(a); f(b)]. Intermediates then exist for one chunk
    at a time: the peak is that of a chunk, beside the inputs and the results so far.

    Cases:
        1. The batch is dimension 0 of the caller's tensors; inside it may be any dimension, or consecutive entries of
           one (tokens of samples as rows of a matrix).
        2. Values that no sample has a part in are computed once, before the chunks; those that have an entry for each
           sample (an expanded class token, a mask) are sliced.
        3. A batch that is no multiple of the number of chunks: the last chunks are one sample smaller.
        4. Results are put together in the layout that they had.
        5. Only stretches of the program, each in chunks of its own: what is read behind one is put together there.

    Numbers: the same operators on smaller tensors. Kernels may add up in another order for another shape, hence the
    tolerance.

    Refusals: everything is refused, with the first node for which it fails, where an operator in a stretch mixes
    samples (batch norm in training mode, a sum over the batch), draws random numbers, or is not known; where a result
    for the caller would be laid out otherwise, or shares memory with another one; and, of a whole program, where a
    result has no batch or inputs are changed. Training programs are returned unchanged.
    """

    name: ClassVar[str] = "chunk_batch"
    tolerance: ClassVar[float] = 4.0

    def __init__(self, chunks: int, stretch: tuple[int, int] | None = None) -> None:
        """Set the number of chunks.

        Args:
            chunks: how many; no more than samples are made.
            stretch: positions in `program.calls`, the second one exclusive, of what runs in chunks; None: everything.

        Raises:
            ValueError: fewer than two chunks.
        """
        if chunks < 2:
            raise ValueError(f"chunks is {chunks}: at least 2 are needed")
        self.parts: tuple[tuple[int, tuple[int, int] | None], ...] = ((chunks, stretch),)

    @classmethod
    def of(cls, stretches: Iterable[Stretch]) -> ChunkBatch:
        """Several stretches, in order, by positions in `program.calls`.

        Raises:
            ValueError: there is none, one has fewer than two chunks, or they overlap.
        """
        found = [cls(item.chunks, (item.start, item.stop)) for item in stretches]
        spans = [stretch for item in found for _, stretch in item.parts if stretch is not None]
        if not found or any(one[1] > other[0] for one, other in itertools.pairwise(spans)):
            raise ValueError("stretches must be given in order, at least one, and not overlap")
        found[0].parts = tuple(part for item in found for part in item.parts)
        return found[0]

    def run(self, program: Program) -> PassResult:
        """Return the program in chunks, as one change; or the program itself and the reason."""
        if program.training:
            return PassResult(program)
        try:
            return self._chunked(program)
        except Refused as error:
            node, reason = error.args
            return PassResult(program, (), (Refusal(node, reason),))

    def _chunked(self, program: Program) -> PassResult:
        plain = self._divided(program, turned=False)
        if plain is None:  # an operator lays a chunk out otherwise than the whole
            plain = self._divided(program, turned=True)
        assert plain is not None
        return plain

    def _divided(self, program: Program, *, turned: bool) -> PassResult | None:
        """The program in chunks; None where what was put together does not lie as it did.

        Args:
            program: what to divide.
            turned: put values together with their dimensions in the order of memory, whatever the operators do.
        """
        new = program.copy()
        try:
            batch = find_batch(new)
        except NotBatched as error:
            raise Refused(program.calls[0].name if program.calls else "output", str(error)) from error
        calls, changes = new.calls, []
        laid_out: dict[str, tuple[int, ...]] = {}
        for chunks, stretch in reversed(self.parts):
            first, last = stretch or (0, len(calls))
            nodes = calls[first:last]
            _require(new, batch, nodes, whole=stretch is None)
            inside = [node for node in nodes if node in batch.rules]
            if not inside:
                raise Refused(nodes[0].name if nodes else "output", "nothing in it depends on the batch")
            before = tuple(node.name for node in inside)
            joined = _Chunks(new, batch, inside, turned=turned).build(bounds(batch.size, chunks))
            laid_out.update(joined)
            summary = f"{len(before)} operations run on {batch.size} samples in {min(chunks, batch.size)} chunks"
            changes.append(Change(summary, before, tuple(joined)))
        forget_inplace(new.graph)
        try:
            finished = new.finish()
        except (ProgramError, RuntimeError, ValueError) as error:
            if not turned:
                return None
            raise Refused(changes[-1].before[0], f"a chunk of it cannot be run: {error}") from error
        for node in finished.calls:
            if node.target is aten.as_strided.default and chunk_of(node) is not None and not same_entries(node):
                raise Refused(changes[-1].before[0], "a chunk of it lies in memory otherwise than the whole")
        made = {node.name: node.meta["val"].stride() for node in finished.calls if node.name in laid_out}
        if made != laid_out and not turned:
            return None
        if seen_by_the_caller(finished) != seen_by_the_caller(program):
            raise Refused(changes[-1].before[0], _SEEN)
        return PassResult(finished, tuple(reversed(changes)))


def bounds(size: int, chunks: int) -> list[tuple[int, int]]:
    """First sample and the one after the last of each chunk; sizes differ by at most one, larger ones first."""
    chunks = min(chunks, size)
    least, more = divmod(size, chunks)
    ends = [least * (index + 1) + min(index + 1, more) for index in range(chunks)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def seen_by_the_caller(program: Program) -> tuple[Any, ...]:
    """The strides of the outputs, and which of them share memory with each other or with inputs."""
    results = [value for value in program.output_nodes if isinstance(value, fx.Node)]
    strides = [tuple(tensor.stride() for tensor in tensors_of(node)) for node in results]
    held = [storages(node).keys() for node in (*results, *program.placeholders)]
    pairs = [(i, j) for i in range(len(results)) for j in range(i + 1, len(held)) if held[i] & held[j]]
    return strides, pairs


def _require(program: Program, batch: Batch, nodes: Sequence[fx.Node], *, whole: bool) -> None:
    """Raise Refused unless the nodes can run in chunks."""
    for node in nodes:
        if node in batch.reasons:
            raise Refused(node.name, batch.reasons[node])
        if node.target is operator.getitem and node.args[0] not in nodes:
            raise Refused(node.name, "it takes one of several results that are made before the stretch")
        if isinstance(batch.states[node], tuple) and any(user not in nodes for user in node.users):
            raise Refused(node.name, "one of its several results is taken behind the stretch")
    for entry, value in zip(program.outputs, program.output_nodes, strict=True):
        if not whole or not isinstance(value, fx.Node):
            continue
        if entry.target is not None:
            raise Refused(value.name, f"it is written back to {entry.target}, which all chunks would change")
        if not isinstance(batch.states.get(value), Batched):
            raise Refused(value.name, "it is a result without a batch dimension")


class _Chunks:
    """Replaces nodes by copies for each chunk, in the graph of a program that is being edited."""

    def __init__(self, program: Program, batch: Batch, inside: Sequence[fx.Node], *, turned: bool) -> None:
        self.graph, self.batch, self.inside, self.turned = program.graph, batch, inside, turned
        self.name = inside[0].name
        self.chunk = Chunk(self.name, 0)
        self.members = set(inside)
        self.cursor = inside[-1]  # new nodes come behind it
        self.copies: dict[fx.Node, fx.Node] = {}
        self.slices: dict[tuple[fx.Node, Batched], fx.Node] = {}

    def build(self, parts: Sequence[tuple[int, int]]) -> dict[str, tuple[int, ...]]:
        """Edit the graph; return by name, with strides as they were, what stands for values that the rest reads."""
        wanted = [node for node in self.inside if any(user not in self.members for user in node.users)]
        self._hoist()
        pieces: dict[fx.Node, list[fx.Node]] = {node: [] for node in wanted}
        for index, (start, stop) in enumerate(parts):
            self.copies, self.slices, self.chunk = {}, {}, Chunk(self.name, index)
            for node in self.inside:
                self.copies[node] = self._copy(node, start, stop)
            for node in wanted:
                pieces[node].append(self.copies[node])
        self.chunk = Chunk(self.name, None)
        after = {}
        for node in wanted:
            whole = self._joined(node, pieces[node])
            node.replace_all_uses_with(whole, delete_user_cb=lambda user: user not in self.members)
            after[whole.name] = tuple(node.meta["val"].stride())
        for node in reversed(self.inside):
            self.graph.erase_node(node)
        return after

    def _hoist(self) -> None:
        """Compute what all samples share before the chunks; it reads nothing of theirs."""
        between = False
        for node in list(self.graph.nodes):
            if node is self.inside[-1]:
                return
            between = between or node is self.inside[0]
            if between and node not in self.members:
                self.inside[0].prepend(node)

    def _add(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> fx.Node:
        with self.graph.inserting_after(self.cursor):
            self.cursor = self.graph.call_function(target, args, dict(kwargs or {}))
        mark(self.cursor, self.chunk)
        return self.cursor

    def _copy(self, node: fx.Node, start: int, stop: int) -> fx.Node:
        """The node for samples from `start` to `stop`, behind the slices that it reads."""
        rule = self.batch.rules[node]

        def operand(value: fx.Node) -> fx.Node:
            if value in self.copies:
                return self.copies[value]
            state = rule.slices.get(value, self.batch.states[value])
            if state is None:
                return value
            assert isinstance(state, Batched)
            if (value, state) not in self.slices:
                span = (start * state.inner, stop * state.inner)
                self.slices[value, state] = self._add(aten.slice.Tensor, (value, state.dim, *span))
            return self.slices[value, state]

        args, kwargs = fx.map_arg((node.args, node.kwargs), operand)
        changed = list(args)
        for position, argument in (rule.resize(stop - start) if rule.resize is not None else {}).items():
            changed[position] = argument
        made = self._add(node.target, tuple(changed), kwargs)
        made.meta = {key: value for key, value in node.meta.items() if key not in ("val", "inplace")}
        mark(made, self.chunk)
        return made

    def _joined(self, node: fx.Node, pieces: Sequence[fx.Node]) -> fx.Node:
        """The chunks' values put together, laid out as the value was where that is dense.

        A concatenation of values that are all laid out channels-last is so itself: they need not be turned first.
        """
        state, value = self.batch.states[node], node.meta["val"]
        assert isinstance(state, Batched)
        order = sorted(range(value.dim()), key=lambda dim: (-value.stride(dim), dim))
        last = value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)
        if order == sorted(order) or (last and not self.turned):
            return self._add(aten.cat.default, (list(pieces), state.dim))
        turned = [self._add(aten.permute.default, (piece, order)) for piece in pieces]
        whole = self._add(aten.cat.default, (turned, order.index(state.dim)))
        return self._add(aten.permute.default, (whole, [order.index(dim) for dim in range(value.dim())]))
