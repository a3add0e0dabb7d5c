"""Several calls of a model in one step: what those hold whose backward has not run."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from memopt.budget import format_bytes
from memopt.memory.reach import is_sparse, plain_tensors, storages_of
from memopt.program import Program
from memopt.step.graph_peaks import GraphPeaks
from memopt.step.planned import fingerprint
from memopt.step.recomputed_calls import RecomputedCall
from memopt.step.script_store import ScriptStore
from memopt.torch_compat import pytree
from memopt.torch_compat.autograd_nodes import compiled_nodes, first_nodes, when_released
from memopt.torch_compat.storages import id_of_storage

# More calls than this are not believed of a record.
_MOST = 1 << 16


# In place of a graph's fingerprint: of a call that runs eagerly.
EAGER = "eager"


class DoesNotFitBesideError(Exception):
    """A graph that was planned for a step of fewer calls has no room beside what earlier calls hold.

    Attributes:
        graph: what it takes.
    """

    def __init__(self, graph: Figures) -> None:
        """Of this graph."""
        super().__init__()
        self.graph = graph


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
        inputs: bytes of its arguments, by storage, without outputs of calls before it.
        calls: of the graphs, those that can be recomputed.
        made: storages of its outputs, which count in what it saves.
        before: the same call before what it saved was gone, until it is recomputed; None where that is there.
    """

    graphs: tuple[Figures, ...]
    inputs: Mapping[int, int]
    calls: tuple[weakref.ref[RecomputedCall], ...] = ()
    made: tuple[weakref.ref[torch.UntypedStorage], ...] = ()
    before: Ran | None = None

    @property
    def dropped(self) -> bool:
        """Whether what it saved is gone."""
        return self.before is not None

    @property
    def as_planned(self) -> Ran:
        """The same call, holding what it saves, as a later step has it."""
        return self if self.before is None else self.before

    @property
    def saved(self) -> int:
        """Bytes that it holds between forward and backward, arguments left out."""
        return sum(graph.peaks.saved for graph in self.graphs)

    @property
    def let_go(self) -> int:
        """Bytes that it has let go of, and holds again once recomputed: outputs that it saved are new ones then."""
        call = self.recomputed
        if call is None or not self.dropped:
            return 0
        return max(0, self.as_planned.saved - self.saved + call.returned_bytes)

    @property
    def recomputed(self) -> RecomputedCall | None:
        """All of it, as a call that can be recomputed; None where it cannot be."""
        return self.calls[0]() if len(self.calls) == len(self.graphs) == 1 else None

    def without_programs(self) -> Ran:
        """The same of which figures alone are kept."""
        before = None if self.before is None else self.before.without_programs()
        graphs = tuple(dataclasses.replace(graph, program=None) for graph in self.graphs)
        return dataclasses.replace(self, graphs=graphs, before=before)

    def without_saved(self, call: RecomputedCall) -> Ran:
        """The same of which only outputs stay until its backward, which begins with forward once more.

        Args:
            call: `recomputed`.
        """
        (graph,), kept = self.graphs, call.kept_bytes
        # The caller's outputs, and their gradients, are there beside those of the second forward.
        backward = max(graph.peaks.forward + 2 * kept, graph.peaks.backward + call.returned_bytes)
        peaks = dataclasses.replace(graph.peaks, saved=kept, backward=backward)
        graphs = (dataclasses.replace(graph, peaks=peaks),)
        return dataclasses.replace(self, graphs=graphs, before=self)


class _Mark:
    """Lives as long as nodes of autograd's graph, which have it; whether a backward has run through one of them."""

    over = False

    def put(self) -> None:
        """Backward has run through the node."""
        self.over = True


def _as_kept_now(ran: Ran) -> Ran:
    call = ran.recomputed
    return ran.without_saved(call) if call is not None and call.dropped else ran


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
        return [_as_kept_now(ran) for ran, _ in self._calls]

    def if_dropped(self) -> list[Ran]:
        """What `alive` returns once `drop` was called."""
        return [ran if call is None else ran.without_saved(call) for ran in self.alive() for call in [ran.recomputed]]

    def drop(self, before: Callable[[Ran], None]) -> None:
        """Let calls go of what they saved, which they recompute; `before` is called with a call as it is about to."""
        for ran in self.alive():
            call = ran.recomputed
            if call is not None and not call.dropped:
                call.drop()
                call.before = functools.partial(before, ran)

    def with_programs(self, programs: Sequence[Program], position: int, calls: int) -> tuple[list[Program], int]:
        """The graphs of all calls of a step, and at which place those of one call begin.

        Args:
            programs: of that call; a call that was not seen is taken for one like it.
            position: of it among the calls.
            calls: how many there are, as far as is known: this may be one more.
        """
        calls = max(calls, position + 1)
        same = {fingerprint(program): program for program in programs}
        every = [list(self.programs[i]) if i < len(self.programs) else list(programs) for i in range(calls)]
        every[position] = list(programs)
        every = [[same.get(fingerprint(program), program) for program in call] for call in every]
        return [program for call in every for program in call], sum(map(len, every[:position]))

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
        nodes, marks = [[node] for node in compiled_nodes(outputs, behind=len(ran.graphs) > 1)], []
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
    parts = (part for leaf in leaves for part in (plain_tensors(leaf) if is_sparse(leaf) else [leaf]))
    return {key: storage.nbytes() for key, storage in storages_of(parts).items()}


def made_by(earlier: Sequence[Ran]) -> set[int]:
    """Storages of the outputs of earlier calls that are still there: a cell's state is an argument of the next call."""
    return {id_of_storage(storage) for ran in earlier for each in ran.made if (storage := each()) is not None}


def without_made(earlier: Sequence[Ran], own: Mapping[int, int]) -> dict[int, int]:
    """Arguments of a call, bytes by storage, without the outputs of earlier ones."""
    made = made_by(earlier)
    return {key: size for key, size in own.items() if key not in made}


def arguments_beside(earlier: Sequence[Ran], own: Mapping[int, int]) -> int:
    """Bytes of arguments that earlier calls hold beside the present one's, by storage.

    Less those of its own that are outputs of theirs: they count in what those save. So it may be below 0.
    """
    together = {key: size for ran in earlier for key, size in ran.inputs.items() if key not in own}
    twice = sum(own.values()) - sum(without_made(earlier, own).values())
    return sum(together.values()) - twice


def calls_in_words(calls: int, earlier: Sequence[Ran], of_others: Sequence[Ran], arguments: int) -> str:
    """What the other calls of a step hold beside the present one, in words; empty for nothing.

    Args:
        calls: that are planned together.
        earlier: of this model, whose backward has not run.
        of_others: of other models that share the budget, whose backward has not run.
        arguments: bytes of the arguments of both, beside those of the present call.
    """
    held = sum(ran.saved for ran in (earlier or of_others)) + (arguments if earlier else 0)
    size = format_bytes(held, short=True)
    if of_others and not earlier:
        return f"calls of the budget's other models, whose backward has not run, hold {size}"
    if not earlier:
        return f"{calls} calls before the first backward hold theirs together" if calls > 1 else ""
    whose = "an earlier call" if len(earlier) == 1 else f"{len(earlier)} earlier calls"
    hold = "holds" if len(earlier) == 1 else "hold"
    return (
        f"{whose} of this step, whose backward has not run, {hold} {size}: in the next step, and when this script is "
        "run again, all calls are planned together; one call on all inputs, or a backward after each call, takes less"
    )
