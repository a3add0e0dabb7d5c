"""Several calls of a model in one step: what those hold whose backward has not run."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from memopt.memory.reach import is_sparse, plain_tensors
from memopt.program import Program
from memopt.step.graph_peaks import GraphPeaks
from memopt.step.script_store import ScriptStore
from memopt.torch_compat import pytree
from memopt.torch_compat.autograd_nodes import compiled_nodes, first_nodes, when_released
from memopt.torch_compat.storages import id_of_storage

# More calls than this are not believed of a record.
_MOST = 1 << 16


# In place of a graph's fingerprint: of a call that runs as it is.
AS_IT_IS = "as it is"


class NoRoomBesideError(Exception):
    """A graph that was planned for a step of fewer calls has no room beside what earlier calls hold."""


@dataclasses.dataclass(frozen=True)
class Figures:
    """One graph that was lowered.

    Attributes:
        peaks: as it runs.
        eager: as PyTorch itself runs it.
        base: bytes of what is resident, without what earlier calls hold.
        key: fingerprint of the graph as captured.
        program: as captured; None where it was loaded from disk.
    """

    peaks: GraphPeaks
    eager: GraphPeaks
    base: int
    key: str
    program: Program | None


@dataclasses.dataclass(frozen=True)
class Ran:
    """What one call of a model holds until its backward.

    Attributes:
        graphs: those that it ran, in order.
        inputs: bytes of its arguments, by storage.
    """

    graphs: tuple[Figures, ...]
    inputs: Mapping[int, int]

    @property
    def saved(self) -> int:
        """Bytes that it holds between forward and backward, arguments left out."""
        return sum(graph.peaks.saved for graph in self.graphs)


class _Mark:
    """Lives as long as nodes of autograd's graph, which have it; whether a backward has run through one of them."""

    over = False

    def put(self) -> None:
        """Backward has run through the node."""
        self.over = True


def _is_alive(reference: weakref.ref[_Mark]) -> bool:
    mark = reference()
    return mark is not None and not mark.over


class EarlierCalls:
    """The calls of a step so far.

    Attributes:
        most: how many calls were seen before the backward of the first of them.
        programs: the graphs of each call of a step, as captured, in the order of the calls.
        inputs: bytes of their arguments together, by storage.
    """

    def __init__(self) -> None:
        """Nothing was called yet."""
        self.clear()

    def clear(self) -> None:
        """Forget all calls: of a model that is planned anew."""
        self.most = 1
        self.programs: list[tuple[Program, ...]] = []
        self.inputs = 0
        self._calls: list[tuple[Ran, list[weakref.ref[_Mark]]]] = []

    def alive(self) -> list[Ran]:
        """The earlier calls whose backward has not run, and may."""
        if self._calls:
            self._calls = [(ran, marks) for ran, marks in self._calls if any(map(_is_alive, marks))]
        return [ran for ran, _ in self._calls]

    def expect(self, calls: int, arguments: Mapping[int, int]) -> None:
        """There are steps of so many calls; the latest has these arguments: bytes by storage."""
        self.most = max(self.most, calls)
        together = {key: size for known, _ in self._calls for key, size in known.inputs.items()}
        self.inputs = max(self.inputs, sum({**together, **arguments}.values()))

    def note(self, ran: Ran, outputs: Any, position: int) -> None:
        """A call has run forward.

        Args:
            ran: what it holds.
            outputs: what it returned.
            position: how many earlier calls were alive when it began.
        """
        nodes, marks = [[node] for node in compiled_nodes(outputs)], []
        if not nodes and (first := first_nodes(outputs)):
            nodes = [first]  # a backward from one output releases what it shares with the others
        for group in nodes:
            mark = _Mark()
            for node in group:
                when_released(node, mark.put)
            marks.append(weakref.ref(mark))
            del mark
        if not marks:
            return
        self._calls.append((ran, marks))
        programs = tuple(graph.program for graph in ran.graphs if graph.program is not None)
        if position <= len(self.programs) and len(programs) == len(ran.graphs):
            self.programs[position : position + 1] = [programs]
        if position:
            self.expect(position + 1, ran.inputs)


class KnownCalls:
    """How many calls a step was found to have that had no room for them: for later runs of the same script."""

    def __init__(self) -> None:
        """Nothing is read or made yet."""
        self._store = ScriptStore("calls")

    def get(self, model: str, budget: str, graph: str) -> tuple[int, int]:
        """The calls, and the bytes of all their arguments; arguments as of `ScriptStore.get`."""
        record = self._store.get(model, budget, graph)
        calls, arguments = record.get("calls"), record.get("arguments")
        if type(calls) is not int or type(arguments) is not int or not 1 <= calls <= _MOST or arguments < 0:
            return 1, 0
        return calls, arguments

    def put(self, model: str, budget: str, graph: str, calls: int, arguments: int) -> None:
        """Keep how many there are; as `get`."""
        self._store.put(model, budget, graph, {"calls": calls, "arguments": arguments})


def arguments_of(args: Any, kwargs: Any) -> dict[int, int]:
    """Bytes of a call's arguments, by storage."""
    leaves = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    storages = (
        part.untyped_storage() for leaf in leaves for part in (plain_tensors(leaf) if is_sparse(leaf) else [leaf])
    )
    return {id_of_storage(storage): storage.nbytes() for storage in storages}


def arguments_beside(earlier: Sequence[Ran], own: Mapping[int, int]) -> int:
    """Bytes of arguments that earlier calls hold beside the present one's, by storage."""
    together = {key: size for ran in earlier for key, size in ran.inputs.items() if key not in own}
    return sum(together.values())
