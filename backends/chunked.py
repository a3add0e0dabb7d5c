"""Programs that run in chunks, as compiled pieces: a stretch is compiled once and called for each of its chunks.

Compiled as one graph, the copies of a stretch would be fused with each other and run in another order, and the values
that the chunks make would be held until all are there. So the program is cut where a chunk begins or ends. Chunks of
equal sizes are one function, which is given the slices that it reads and the slices of the results that it writes: what
is put together is never there twice. What all chunks share is computed before them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from memopt.backends.aten import Boxed
from memopt.patterns.chunks import Chunk, chunk_of
from memopt.program import Program, describe, is_view

aten = torch.ops.aten

Lower = Callable[[fx.GraphModule], Boxed]


class NotInPieces(Exception):
    """The program cannot be cut where its chunks begin and end; the message says why."""


@dataclasses.dataclass(frozen=True)
class Slice:
    """Part of a value along one dimension: entries from `start` to before `stop`."""

    node: fx.Node
    dim: int
    start: int
    stop: int

    def of(self, value: torch.Tensor) -> torch.Tensor:
        """The part, as a view."""
        return value.narrow(self.dim, self.start, self.stop - self.start)


@dataclasses.dataclass
class _Piece:
    """Operations that are compiled together.

    Attributes:
        chunk: which chunk they are of; None outside of stretches.
        nodes: in order, with what they look at of others' values.
        reads: by node that stands for it in the piece, what it is given: another piece's value, or a part of it.
        makes: nodes whose values others read.
        writes: of chunks, nodes whose values are put together, and where they go.
    """

    chunk: Chunk | None
    nodes: list[fx.Node] = dataclasses.field(default_factory=list)
    reads: dict[fx.Node, fx.Node | Slice] = dataclasses.field(default_factory=dict)
    makes: list[fx.Node] = dataclasses.field(default_factory=list)
    writes: list[tuple[fx.Node, Slice]] = dataclasses.field(default_factory=list)

    def touched(self) -> set[fx.Node]:
        """Values that must be there while it runs."""
        read = {item if isinstance(item, fx.Node) else item.node for item in self.reads.values()}
        return read | {place.node for _, place in self.writes}


@dataclasses.dataclass(frozen=True)
class _Call:
    """A piece with its function; `takes` are allocated before it, `frees` are not needed after it."""

    piece: _Piece
    run: Boxed
    takes: tuple[fx.Node, ...]
    frees: tuple[fx.Node, ...]


class ChunkedCode:
    """A program in chunks as a function of the values of all its inputs, constants included, in order.

    Attributes:
        functions: how many distinct functions were compiled.
    """

    def __init__(self, program: Program, lower: Lower) -> None:
        """Cut the program and compile its pieces.

        Args:
            program: an inference program with marked chunks.
            lower: makes a function of a graph module whose placeholders have values; the last ones may be written to.

        Raises:
            NotInPieces: it cannot be cut.
        """
        self._inputs, self._outputs = program.placeholders, program.output_nodes
        pieces = _Cut(program).pieces
        known: dict[str, Boxed] = {}
        runs = []
        for piece in pieces:
            key, graph = _graph_of(piece)
            if key not in known:
                known[key] = lower(fx.GraphModule(program.graph_module, graph))
            runs.append(known[key])
        self.functions = len(known)
        self._calls = _with_lifetimes(pieces, runs, self._outputs)

    def __call__(self, *values: Any) -> list[Any]:
        """Run."""
        held: dict[fx.Node, Any] = dict(zip(self._inputs, values, strict=True))
        for call in self._calls:
            for node in call.takes:
                fake = node.meta["val"]
                held[node] = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
            read, written = call.piece.reads.values(), call.piece.writes
            given = [held[item] if isinstance(item, fx.Node) else item.of(held[item.node]) for item in read]
            given += [place.of(held[place.node]) for _, place in written]
            for node in call.frees:
                del held[node]  # the function lets go of what it is given as early as it can
            held.update(zip(call.piece.makes, call.run(given), strict=True))
        return [held[value] if isinstance(value, fx.Node) else value for value in self._outputs]


def is_chunked(program: Program) -> bool:
    """Whether some of the program's operations run in chunks."""
    return any(chunk_of(node) is not None for node in program.calls)


class _Cut:
    """Divides a program's calls into pieces."""

    def __init__(self, program: Program) -> None:
        self.pieces: list[_Piece] = [_Piece(None)]
        self._joined: dict[fx.Node, Chunk] = {}  # concatenations of chunks
        self._piece: dict[fx.Node, _Piece] = {}
        self._divide(program.calls)
        for piece in self.pieces:
            self._read(piece)
        for whole in self._joined:
            self._write(whole)
        self._make({value for value in program.output_nodes if isinstance(value, fx.Node)})
        self.pieces = [piece for piece in self.pieces if piece.makes or piece.writes]

    def _divide(self, calls: Sequence[fx.Node]) -> None:
        """Put every call into a piece: its chunk's, or the one before or behind the stretch."""
        stretch: str | None = None  # the one whose chunks are not all put together yet
        plain = self.pieces[0]
        chunks: dict[Chunk, _Piece] = {}
        for node in calls:
            chunk = self._chunk(node)
            if chunk is not None and chunk.index is None:
                self._joined[node], stretch = chunk, None
                continue
            if stretch is None and chunk not in chunks and self.pieces[-1].chunk is not None:
                plain = _Piece(None)
                self.pieces.append(plain)
            if chunk is None:  # between chunks: it reads nothing of theirs, and is computed before them
                piece = plain
            elif chunk in chunks:
                piece = chunks[chunk]
            elif stretch not in (None, chunk.stretch):
                raise NotInPieces(f"{node.name} is of another stretch than what runs around it")
            else:
                stretch, piece = chunk.stretch, _Piece(chunk)
                chunks[chunk] = piece
                self.pieces.append(piece)
            piece.nodes.append(node)
            self._piece[node] = piece

    def _chunk(self, node: fx.Node) -> Chunk | None:
        """The node's chunk: its own mark, or that of what it reads, where a rewrite made it of a chunk's values."""
        own = chunk_of(node)
        if own is not None and own.index is None:
            if node.target is aten.cat.default:
                return own
            own = None  # it turns a chunk's value before, or the whole after
        found = {self._piece[value].chunk for value in node.all_input_nodes if value in self._piece} - {None}
        if own is not None:
            found.add(own)
        if len(found) > 1:
            raise NotInPieces(f"{node.name} reads values of several chunks")
        return next(iter(found), None)

    def _read(self, piece: _Piece) -> None:
        """Find what the piece reads; views of others' values are taken anew where they are read."""
        own, piece.nodes = piece.nodes, []
        inside: set[fx.Node] = set()

        def visit(node: fx.Node) -> None:
            if node in inside or node in piece.reads:
                return
            entry = _entry_slice(node)
            if self._piece.get(node) is piece:
                if piece.chunk is not None and entry is not None and self._piece.get(entry.node) is not piece:
                    piece.reads[node] = entry
                    return
            elif node.op == "placeholder" or node in self._joined or not _looks_at_one(node):
                if not isinstance(node.meta["val"], torch.Tensor):
                    raise NotInPieces(f"{node.name} is made elsewhere than it is read")
                piece.reads[node] = node
                return
            for operand in node.all_input_nodes:
                visit(operand)
            inside.add(node)
            piece.nodes.append(node)

        for node in own:
            visit(node)

    def _write(self, whole: fx.Node) -> None:
        """Have the chunks write their values where they belong."""
        parts: Any = whole.args[0]
        dim = (whole.args[1] if len(whole.args) > 1 else 0) % whole.meta["val"].dim()
        start = 0
        for part in parts:
            piece = self._piece.get(part)
            if piece is None or piece.chunk is None or piece.chunk.stretch != self._joined[whole].stretch:
                raise NotInPieces(f"{part.name} is put together with values of chunks, and is of none")
            stop = start + int(part.meta["val"].shape[dim])
            piece.writes.append((part, Slice(whole, dim, start, stop)))
            start = stop

    def _make(self, outputs: set[fx.Node]) -> None:
        wanted = outputs | {node for piece in self.pieces for node in piece.touched()}
        for node in wanted:
            if node in self._piece:
                self._piece[node].makes.append(node)
        place = {node: index for index, node in enumerate(self._piece)}
        for piece in self.pieces:
            piece.makes.sort(key=lambda node: place[node])


def _entry_slice(node: fx.Node) -> Slice | None:
    """The node as a part of a value along one dimension."""
    if node.target is not aten.slice.Tensor or len(node.args) != 4 or node.kwargs:
        return None
    source, dim, start, stop = node.args
    assert isinstance(source, fx.Node) and isinstance(start, int) and isinstance(stop, int) and isinstance(dim, int)
    size = int(source.meta["val"].shape[dim])
    return Slice(source, dim, start, stop) if 0 <= start <= stop <= size else None


def _looks_at_one(node: fx.Node) -> bool:
    """Whether the node is a view of one value, which costs nothing to take again."""
    return is_view(node) and len(node.all_input_nodes) == 1 and isinstance(node.meta["val"], torch.Tensor)


def _graph_of(piece: _Piece) -> tuple[str, fx.Graph]:
    """The piece as a graph, and a text that is equal for pieces that one function serves."""
    graph = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    text = []
    for node in piece.reads:
        nodes[node] = graph.placeholder(f"read_{len(nodes)}")
        nodes[node].meta["val"] = node.meta["val"]
        text.append(describe(node.meta["val"]))
    places: list[tuple[fx.Node, fx.Node]] = []
    for node, slot in piece.writes:
        place = graph.placeholder(f"place_{len(places)}")
        place.meta["val"] = slot.of(slot.node.meta["val"])
        places.append((node, place))
        text.append(describe(place.meta["val"]))
    for node in piece.nodes:
        nodes[node] = graph.node_copy(node, lambda value: nodes[value])
        nodes[node].name = f"n{len(nodes)}"
        text.append(f"{nodes[node].name} {node.target} {nodes[node].args} {nodes[node].kwargs}")
    for node, place in places:
        graph.call_function(aten.copy_.default, (place, nodes[node]))
        text.append(f"{place.name} {nodes[node].name}")
    graph.output(tuple(nodes[node] for node in piece.makes))
    text.append(f"{[nodes[node].name for node in piece.makes]}")
    return "\n".join(text), graph


def _with_lifetimes(pieces: Sequence[_Piece], runs: Sequence[Boxed], outputs: Sequence[Any]) -> list[_Call]:
    """The calls, with what is allocated before each and let go of at it."""
    first: dict[fx.Node, int] = {}
    last: dict[fx.Node, int] = {}
    for index, piece in enumerate(pieces):
        for _, place in piece.writes:
            first.setdefault(place.node, index)
        for node in piece.touched():
            last[node] = index
    kept = {value for value in outputs if isinstance(value, fx.Node)}
    return [
        _Call(
            piece,
            run,
            tuple(node for node, at in first.items() if at == index),
            tuple(node for node, at in last.items() if at == index and node not in kept and node.op != "placeholder"),
        )
        for index, (piece, run) in enumerate(zip(pieces, runs, strict=True))
    ]
