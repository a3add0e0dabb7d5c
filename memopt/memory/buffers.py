"""BufferPlan: where every value of an inference program lives, as plain data that prints and is checked."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

from memopt.budget import format_bytes
from memopt.solve.liveness import profile


class PlacementError(ValueError):
    """A plan lets two values share memory that both need, or places one outside of its block; the message names it."""


class Home(enum.Enum):
    """Who provides a block of memory."""

    ARENA = "arena"  # the one arena that all calls share
    OUTPUT = "output"  # a fresh tensor at every call, which the caller may hold
    OPERATOR = "operator"  # the operator itself, which cannot write into memory that it is given


@dataclasses.dataclass(frozen=True)
class Block:
    """Memory that is taken and given back as one.

    Attributes:
        name: the node that needs it first; scratch memory is called after its node too.
        home: who provides it.
        nbytes: its size.
        start, end: the half-open span of steps in which it is in use.
        offset: its first byte in the arena; 0 for other homes.
        holds: the names of the nodes whose storages lie in it: more than one where a concatenation was avoided.
        scratch: whether it holds no value, and is needed only while its node runs.
    """

    name: str
    home: Home
    nbytes: int
    start: int
    end: int
    offset: int = 0
    holds: tuple[str, ...] = ()
    scratch: bool = False


@dataclasses.dataclass(frozen=True)
class Placement:
    """One tensor in a block.

    Attributes:
        block: index into the plan's blocks.
        offset: its first byte in the block.
        shape, strides: in elements.
        itemsize: bytes of one element.
    """

    block: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @property
    def end(self) -> int:
        """The first byte of the block behind the tensor."""
        if 0 in self.shape:
            return self.offset
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return self.offset + (last + 1) * self.itemsize


@dataclasses.dataclass(frozen=True)
class BufferPlan:
    """Where every value lives. Views have no entry: they are taken of their base, and last as long.

    Attributes:
        steps: names of the call nodes in order of execution (items of multiple results left out).
        blocks: all memory but the inputs'.
        values: by node name, the placement of each tensor of its value, in order; None for one without memory.
        reads: per step, the blocks that it reads.
        scratch: by node name, the block that the node needs only while it runs.
        joins: by the name of a concatenation, for each part whether its producer writes into the result.
        arena_bytes: the size of the arena.
        lower_bound: no placement of these blocks takes a smaller arena.
        alignment: every block of the arena begins at a multiple of it, in bytes.
    """

    steps: tuple[str, ...]
    blocks: tuple[Block, ...]
    values: Mapping[str, tuple[Placement | None, ...]]
    reads: tuple[tuple[int, ...], ...]
    scratch: Mapping[str, int]
    joins: Mapping[str, tuple[bool, ...]]
    arena_bytes: int
    lower_bound: int
    alignment: int

    @property
    def output_bytes(self) -> int:
        """Bytes of the fresh tensors that one call makes for its results."""
        return sum(block.nbytes for block in self.blocks if block.home is Home.OUTPUT)

    @property
    def operator_bytes(self) -> int:
        """The most bytes at once that operators allocate for results that cannot be placed."""
        spans = [(block.start, block.end, block.nbytes) for block in self.blocks if block.home is Home.OPERATOR]
        return int(profile(len(self.steps), spans).max(initial=0))

    @property
    def total_bytes(self) -> int:
        """Bytes of all values that are placed, each as if it had memory of its own."""
        return sum(block.nbytes for block in self.blocks if block.home is not Home.OPERATOR)

    def check(self) -> None:
        """Judge the plan block by block, sharing no code with the planner.

        Raises:
            PlacementError: two blocks in use at the same step share bytes of the arena, a block leaves the arena or is
                not aligned, a value leaves its block, or a step reads a block that is not in use.
        """
        arena = sorted(
            (block for block in self.blocks if block.home is Home.ARENA and block.nbytes), key=lambda b: b.offset
        )
        for index, block in enumerate(arena):
            end = block.offset + block.nbytes
            if block.offset < 0 or end > self.arena_bytes:
                raise PlacementError(f"{block.name} lies at {block.offset}..{end}, outside of {self.arena_bytes} bytes")
            if block.offset % self.alignment:
                raise PlacementError(f"{block.name} begins at byte {block.offset}, no multiple of {self.alignment}")
            for other in arena[index + 1 :]:
                if other.offset >= end:
                    break
                if other.start < block.end and block.start < other.end:
                    raise PlacementError(
                        f"{block.name} and {other.name} share bytes at step {max(block.start, other.start)}"
                    )
        for name, placements in self.values.items():
            for place in placements:
                if place is not None and not 0 <= place.offset <= place.end <= self.blocks[place.block].nbytes:
                    raise PlacementError(f"{name} reaches outside of the block of {self.blocks[place.block].name}")
        for step, blocks in enumerate(self.reads):
            for index in blocks:
                if not self.blocks[index].start <= step < self.blocks[index].end:
                    raise PlacementError(
                        f"{self.steps[step]} reads the block of {self.blocks[index].name} out of its time"
                    )

    def __str__(self) -> str:
        """A table of the blocks in order of time: where, how much, from which step to which, and what."""
        proof = "the least" if self.arena_bytes == self.lower_bound else f"at least {format_bytes(self.lower_bound)}"
        lines = [
            f"arena {format_bytes(self.arena_bytes)} ({proof}) for {format_bytes(self.total_bytes)} of values; "
            f"results {format_bytes(self.output_bytes)}; by operators {format_bytes(self.operator_bytes)}",
            f"{'address':>12} {'bytes':>12} {'from':>5} {'to':>5}  what",
        ]
        for block in sorted(self.blocks, key=lambda b: (b.start, b.offset, b.name)):
            where = str(block.offset) if block.home is Home.ARENA else block.home.value
            what = f"scratch of {block.name}" if block.scratch else ", ".join(block.holds)
            lines.append(f"{where:>12} {block.nbytes:>12} {block.start:>5} {block.end:>5}  {what}")
        return "\n".join(lines)
