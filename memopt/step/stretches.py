"""Which stretches of an inference program to run in chunks of its batch: the program in numbers for `solve.chunks`."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from memopt.memory.aliasing import analyse, owner
from memopt.memory.cost.devices import Device
from memopt.memory.cost.roofline import moving_seconds
from memopt.memory.cost.table import OperatorCost
from memopt.memory.rounding import allocated_bytes
from memopt.memory.timeline import Timeline, lifetimes
from memopt.patterns.batch import Batch, find_batch
from memopt.program import Program
from memopt.solve.chunks import Chunking, ChunkProblem, ChunkSearch, Storage, Stretch, Value

# What a further call adds where kernels follow one another without a launch each, as a share of a launch.
_GAP = 0.25
TOLD = "to keep the budget, "  # how the note to the user begins
_MOVED = 1 << 24  # bytes, by which the speed of putting together is told


class Stretches:
    """Finds stretches for one program: limits in bytes above what is resident, answers as positions in its calls."""

    def __init__(self, program: Program, line: Timeline, costs: Mapping[str, OperatorCost], device: Device) -> None:
        """Describe the program.

        Args:
            program: an inference program, in-place annotations included.
            line: its memory, for what operations take beside.
            costs: seconds by node name.
            device: for the least time of a call.

        Raises:
            NotBatched: it has no batch.
        """
        self.batch = find_batch(program)
        self._program = program
        self._steps = [node for node in program.calls if node.target is not operator.getitem]
        self.search = ChunkSearch(lower_chunks(program, self.batch, line, costs, device))

    def within(self, limit: int) -> tuple[Chunking, tuple[Stretch, ...]] | None:
        """The chunking that takes least time within a limit, and its stretches in `program.calls`."""
        found = self.search.within(limit)
        if found is None:
            return None
        calls = {node: index for index, node in enumerate(self._program.calls)}
        ends = [*(calls[node] for node in self._steps), len(calls)]
        ends[0] = 0
        return found, tuple(Stretch(ends[s.start], ends[s.stop], s.chunks) for s in found.stretches)

    @property
    def reason(self) -> str:
        """The first operation that cannot be divided, and why; empty where all can."""
        return next((f"{node.name}: {reason}" for node, reason in self.batch.reasons.items()), "")


def lower_chunks(
    program: Program, batch: Batch, line: Timeline, costs: Mapping[str, OperatorCost], device: Device
) -> ChunkProblem:
    """Describe an inference program in numbers: step k is its k-th call, items of multiple results left out."""
    aliasing = analyse(program)
    life = lifetimes(program, aliasing)
    steps = life.steps
    position = {node: index for index, node in enumerate(steps)}
    return ChunkProblem(
        samples=batch.size,
        storages=tuple(
            Storage(
                span[0],
                len(steps) + 1 if storage.index in life.held else span[1],
                storage.nbytes,
                storage.producer in batch.rules,
            )
            for storage, span in zip(aliasing.storages, life.spans, strict=True)
            if span is not None
        ),
        values=tuple(_values(program, batch, position)),
        workspace=line.workspace_bytes,
        seconds=tuple(costs[node.name].seconds if node.name in costs else 0.0 for node in steps),
        free=_free(program, batch, position),
        places=_places(program, position),
        counts=counts_of(batch.size),
        least_seconds=moving_seconds(0, device),
        call_seconds=_GAP * moving_seconds(0, device),
        byte_seconds=2 * moving_seconds(_MOVED, device) / _MOVED,
    )


def counts_of(samples: int) -> tuple[int, ...]:
    """Numbers of chunks worth a try: those of equal chunks, powers of two, and one sample at a time."""
    found = {count for count in range(2, samples + 1) if samples % count == 0 or count & (count - 1) == 0}
    return tuple(sorted(found))


def _values(program: Program, batch: Batch, position: Mapping[fx.Node, int]) -> list[Value]:
    """What has an entry for each sample, from where it is made to where it is read last."""
    found = []
    for node in program.calls:
        value = node.meta["val"]
        if node not in batch.rules or not isinstance(value, torch.Tensor):
            continue
        uses = [len(position) if user.op == "output" else position[owner(user)] for user in node.users]
        made = position[owner(node)]
        size = allocated_bytes(value.numel() * value.element_size(), value.device)
        found.append(Value(made, max(uses, default=made), size))
    return found


def _free(program: Program, batch: Batch, position: Mapping[fx.Node, int]) -> tuple[bool, ...]:
    free = [True] * len(position)
    for node in program.calls:
        if node in batch.reasons:
            free[position[owner(node)]] = False
    return tuple(free)


def _places(program: Program, position: Mapping[fx.Node, int]) -> tuple[bool, ...]:
    """Not between an operation and the items of its results, wherever they are taken."""
    places, step = [True] * (len(position) + 1), -1
    for node in program.calls:
        if node in position:
            step = position[node]
            continue
        for between in range(position[owner(node)] + 1, step + 1):
            places[between] = False
    return tuple(places)


def chunks_line(stretches: Sequence[Stretch], program: Program, samples: int, added: float) -> str:
    """What the user reads of them; `added` in seconds."""
    calls = program.calls
    parts = [
        f"{stretch.stop - stretch.start} of {len(calls)} operations ({calls[stretch.start].name} to "
        f"{calls[stretch.stop - 1].name}) run in {stretch.chunks} chunks of the batch of {samples}"
        for stretch in stretches
    ]
    return f"{TOLD}{'; '.join(parts)}; that takes {added * 1e3:.2g} ms more by estimate"
