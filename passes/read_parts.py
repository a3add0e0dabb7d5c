"""ReadParts: what was written to a part of a tensor is read as it was before it was written there."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import fx

from memopt.graph.propagation import ProgramError
from memopt.graph.rewrite import descendants, erase_unused
from memopt.memory.sharing import Sharing
from memopt.pass_manager import Change, Pass, PassResult, Refusal
from memopt.program import Program, tensors_of

aten = torch.ops.aten

# What reads a part, by what writes one.
READERS = {aten.slice_scatter.default: aten.slice.Tensor, aten.select_scatter.default: aten.select.int}


class ReadParts(Pass):
    """Read a written value itself, where a part of a tensor was read that holds it.

    Algebra: a part of a tensor, once written, holds what was written. A buffer that is used tile by tile is a new
    tensor after each write, as graphs are functional; where all its readers read what was written last to their own
    part, nothing of the buffer is left.

    Cases:
        1. slice(slice_scatter(base, x, part), part) is x; so with select.
        2. slice_scatter(slice_scatter(base, x, part), y, part) is slice_scatter(base, y, part).
        3. slice_scatter(base, copy(_, x), part) is slice_scatter(base, x, part): the copy has the gaps of a part.

    Numbers: a part has gaps, and what was written to it mostly has none; a reader may sum in another order then.

    Refusals: the part is an output, or something shown of it is; the caller, or backward, would share memory that it
    did not share; strides are read by number (as_strided); an output would come out with other strides.
    """

    name: ClassVar[str] = "read_parts"
    tolerance: ClassVar[float] = 4.0

    def run(self, program: Program) -> PassResult:
        """Return the program whose parts are read as they were written; one change per part."""
        written = next((node for node in program.calls if node.target in READERS), None)
        if written is None:
            return PassResult(program)
        new = program.copy()
        work = _Parts(new)
        work.run()
        if not work.changes:
            return PassResult(program, (), tuple(work.refusals))
        left = {node.name for node in new.graph.nodes}
        changes = [dataclasses.replace(each, after=tuple(left.intersection(each.after))) for each in work.changes]
        try:
            result = PassResult.of(program, new, changes, work.refusals)
        except (RuntimeError, ProgramError) as error:
            return PassResult(program, (), (Refusal(written.name, f"a view does not exist without gaps: {error}"),))
        if _outputs(result.program) != _outputs(program):
            return PassResult(program, (), (Refusal(written.name, "an output would come out with other strides"),))
        return result


class _Parts:
    """One walk over a graph that is being edited, first node to last."""

    def __init__(self, program: Program) -> None:
        self.graph, self.sharing = program.graph, Sharing(program)
        self.outputs = {value for value in program.output_nodes if isinstance(value, fx.Node)}
        self.changes: list[Change] = []
        self.refusals: list[Refusal] = []
        self.erased: set[str] = set()

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node.name in self.erased:
                continue
            if node.target in READERS:
                self._write(node)
            elif node.target in READERS.values():
                self._read(node)

    def _write(self, node: fx.Node) -> None:
        base, value = node.args[0], node.args[1]
        if isinstance(value, fx.Node) and value.target is aten.copy.default and _is_alike(value, value.args[1]):
            self._take(node, 1, value.args[1], f"{node.name} writes what {value.name} copies")
        if isinstance(base, fx.Node) and base.target is node.target and _part(base, 2) == _part(node, 2):
            self._take(node, 0, base.args[0], f"{node.name} writes over all of what {base.name} has written")

    def _take(self, node: fx.Node, place: int, operand: Any, summary: str) -> None:
        before = node.args[place]
        assert isinstance(before, fx.Node)
        node.update_arg(place, operand)
        gone = self._erase(before)
        self.changes.append(Change(summary, (*gone[::-1], node.name), (node.name,)))

    def _read(self, node: fx.Node) -> None:
        written = node.args[0]
        known: Any = written.target if isinstance(written, fx.Node) else None
        if not isinstance(written, fx.Node) or READERS.get(known) is not node.target:
            return
        value = written.args[1]
        if _part(written, 2) != _part(node, 1) or not _is_alike(node, value):
            return
        assert isinstance(value, fx.Node)
        reason = self._reason_against(node, value)
        if reason is not None:
            self.refusals.append(Refusal(node.name, reason))
            return
        self.sharing.merge(node, value)
        node.replace_all_uses_with(value)
        gone = self._erase(node)
        self.changes.append(Change(f"{node.name} shows what was written, {value.name}", tuple(gone[::-1]), ()))

    def _reason_against(self, node: fx.Node, value: fx.Node) -> str | None:
        if node in self.outputs:
            return "it is an output"
        if any(each.target is aten.as_strided.default for each in descendants([node])):
            return "strides are read of it by number"
        return self.sharing.reason_against(node, value)

    def _erase(self, node: fx.Node) -> list[str]:
        gone = erase_unused(self.graph, [node])
        self.erased.update(gone)
        return gone


def _part(node: fx.Node, first: int) -> tuple[Any, ...]:
    """The part that a node reads or writes; its arguments from the given place on say which."""
    whole = node.args[0]
    assert isinstance(whole, fx.Node)
    shape = whole.meta["val"].shape
    given: list[Any] = list(node.args[first:])
    dim = (given[0] if given else 0) % len(shape)
    if node.target in (aten.select.int, aten.select_scatter.default):
        index, size = given[1], shape[dim]
        return dim, index % size if isinstance(index, int) and isinstance(size, int) else index
    bounds = dict(enumerate(given[1:]))
    start, end = _place(bounds.get(0), 0, shape[dim]), _place(bounds.get(1), shape[dim], shape[dim])
    return dim, start, end, bounds.get(2, 1)


def _place(value: Any, otherwise: Any, size: Any) -> Any:
    if value is None:
        return otherwise
    if not isinstance(value, int) or not isinstance(size, int):
        return value
    return max(0, min(value + size if value < 0 else value, size))


def _is_alike(node: fx.Node, value: Any) -> bool:
    """Whether a node's value has the shape, dtype and device of another one."""
    if not isinstance(value, fx.Node) or not isinstance(value.meta.get("val"), torch.Tensor):
        return False
    one, other = node.meta["val"], value.meta["val"]
    kinds = [(each.shape, each.dtype, each.device, each.layout, each.is_conj(), each.is_neg()) for each in (one, other)]
    return kinds[0] == kinds[1]


def _outputs(program: Program) -> list[Any]:
    nodes = [node for node in program.output_nodes if isinstance(node, fx.Node)]
    return [(tuple(each.shape), each.stride(), each.storage_offset()) for node in nodes for each in tensors_of(node)]
