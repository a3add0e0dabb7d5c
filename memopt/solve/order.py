"""The order of execution with the smallest peak: operations with precedences and storages in, a permutation out.

A state is a downset: the set of operations that have run. What is alive depends on the set alone, so the least peak is
a shortest path among downsets under the maximum, which dynamic programming finds (Ahn et al., "Ordering Chaos:
Memory-Aware Scheduling of Irregularly Wired Neural Networks", 2020). Three things keep the downsets few: a move that
fits below the peak reached so far and leaves no more alive than before is always right, so it is the only one tried;
operations that need nothing run right before the first that needs them; states that cannot beat the best known order
are cut off. A beam search finds that order first. When the effort is spent, the least peak among the open states is a
proven lower bound.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence
from typing import NamedTuple


class OrderError(ValueError):
    """The numbers do not describe a graph, or an order is not what it claims to be; the message names the operation."""


@dataclasses.dataclass(frozen=True)
class OrderProblem:
    """Operations, numbered in the order given, and the storages that they touch.

    A storage is alive from the first operation that touches it to the last, and to the end when it is pinned.

    Attributes:
        sizes: bytes of each storage.
        touches: per operation, the storages that must be alive while it runs: those that it reads and creates.
        after: per operation, the operations that must run before it; each has a smaller number.
        workspace: per operation, bytes that it needs only while it runs.
        pinned: storages that stay alive to the end once they were created.
        takes: per operation, the storage whose memory its result takes over if nothing touches that storage later; -1
            for none. It counts when the operation creates at least as many bytes.

    Raises:
        OrderError: lengths differ, a number is negative or out of range, or a predecessor does not come earlier.
    """

    sizes: tuple[int, ...]
    touches: tuple[tuple[int, ...], ...]
    after: tuple[tuple[int, ...], ...]
    workspace: tuple[int, ...]
    pinned: frozenset[int] = frozenset()
    takes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.touches)
        if len(self.after) != count or len(self.workspace) != count or len(self.takes) not in (0, count):
            raise OrderError(f"after, workspace or takes have not one entry for each of {count} operations")
        if any(size < 0 for size in (*self.sizes, *self.workspace)):
            raise OrderError("a size or a workspace is negative")
        known = range(len(self.sizes))
        for operation, (touched, before) in enumerate(zip(self.touches, self.after, strict=True)):
            if len(set(touched)) != len(touched) or any(storage not in known for storage in touched):
                raise OrderError(f"operation {operation} names a storage twice, or one that does not exist: {touched}")
            if any(not 0 <= other < operation for other in before):
                raise OrderError(f"operation {operation} comes after {before}, which are not all earlier operations")
            if self.takes and self.takes[operation] != -1 and self.takes[operation] not in touched:
                raise OrderError(f"operation {operation} takes storage {self.takes[operation]} without touching it")
        if any(storage not in known for storage in self.pinned):
            raise OrderError("pinned names a storage that does not exist")


@dataclasses.dataclass(frozen=True)
class Order:
    """An order of execution and what is known of it.

    Attributes:
        steps: the operations, each once.
        peak_bytes: the most bytes alive at any step.
        lower_bound: no order has a smaller peak than this; equal to `peak_bytes` when the order is proved best.
    """

    steps: tuple[int, ...]
    peak_bytes: int
    lower_bound: int

    @property
    def optimal(self) -> bool:
        """Whether no order has a smaller peak."""
        return self.lower_bound == self.peak_bytes


def live_bytes(problem: OrderProblem, steps: Sequence[int]) -> tuple[int, ...]:
    """The bytes alive at each step of an order, workspace included."""
    graph, mask, live, found = _Graph(problem), 0, 0, []
    for operation in steps:
        during, live = graph.run(mask, live, operation)
        mask |= 1 << operation
        found.append(during)
    return tuple(found)


def smallest_peak(problem: OrderProblem, *, effort: int = 100_000, beam: int = 32) -> Order:
    """Find an order with a small peak, the smallest where the effort suffices to prove it.

    The order given is kept when none better is found. The result depends on nothing but the arguments.

    Args:
        problem: the operations.
        effort: how many moves the exact search may try; about 20 µs each.
        beam: how many states the beam search keeps at each depth.
    """
    count = len(problem.touches)
    live = live_bytes(problem, range(count))
    best = Order(tuple(range(count)), max(live, default=0), 0)
    graph = _Graph(problem)
    floor = graph.lower_bound(live)
    if best.peak_bytes > floor:
        found = _beam(graph, floor, best.peak_bytes, beam)
        best = found or best
    if best.peak_bytes > floor:
        found, floor = _exact(graph, floor, best.peak_bytes, effort)
        best = found or best
    return dataclasses.replace(best, lower_bound=min(floor, best.peak_bytes))


class _Taken(NamedTuple):
    """What a move takes: bytes beside those alive before it, at its peak and afterwards, and what it runs."""

    peak: int
    live: int
    mask: int
    moves: tuple[int, ...]


class _Graph:
    """The problem as bit masks: operation k is bit k."""

    def __init__(self, problem: OrderProblem) -> None:
        count = len(problem.touches)
        self.problem, self.full = problem, (1 << count) - 1
        self.before = [sum(1 << other for other in set(others)) for others in problem.after]
        self.next: list[list[int]] = [[] for _ in range(count)]
        for operation, others in enumerate(problem.after):
            for other in set(others):
                self.next[other].append(operation)
        touchers = [0] * len(problem.sizes)
        for operation, storages in enumerate(problem.touches):
            for storage in storages:
                touchers[storage] |= 1 << operation
        self.touchers = touchers
        self.storages = [
            [(touchers[s], problem.sizes[s], s in problem.pinned, s) for s in storages if problem.sizes[s]]
            for storages in problem.touches
        ]
        self.takes = problem.takes or (-1,) * count
        self.lazy = [self._is_lazy(operation) for operation in range(count)]
        near = [0] * count  # what touches something that the operation touches
        for operation, storages in enumerate(problem.touches):
            for storage in storages:
                near[operation] |= touchers[storage]
        # Of what has run a move's bytes depend on these bits alone: what it takes is counted once for each value.
        self._matters = list(near)
        for operation, others in enumerate(problem.after):
            for other in others:
                self._matters[operation] |= 1 << other | near[other]
        self._taken: list[dict[int, _Taken]] = [{} for _ in range(count)]

    def _is_lazy(self, operation: int) -> bool:
        """Whether to run it right before the first operation that needs it: nothing is lost by waiting."""
        touched = set(self.problem.touches[operation])
        return (
            not self.before[operation]
            and not self.problem.workspace[operation]
            and bool(self.next[operation])
            and all(touched <= set(self.problem.touches[after]) for after in self.next[operation])
        )

    def run(self, mask: int, live: int, operation: int) -> tuple[int, int]:
        """The bytes alive while `operation` runs after the set `mask`, and those alive afterwards."""
        done = mask | 1 << operation
        created = freed = taken = 0
        for touchers, size, pinned, storage in self.storages[operation]:
            if not touchers & mask:
                created += size
            if not pinned and not touchers & ~done:
                freed += size
                if storage == self.takes[operation] and touchers & mask:
                    taken = size
        during = live + created + self.problem.workspace[operation]
        return during - taken if created >= taken else during, live + created - freed

    def taken(self, mask: int, operation: int) -> _Taken:
        """What a ready operation takes after the set `mask`, with what it needs that was waiting."""
        known = self._taken[operation]
        bits = mask & self._matters[operation]
        if bits not in known:
            known[bits] = self._counted(mask, operation)
        return known[bits]

    def _counted(self, mask: int, operation: int) -> _Taken:
        live, peak, moves, added = 0, 0, list[int](), 0
        for other in (*self.problem.after[operation], operation):
            if not mask >> other & 1:
                during, live = self.run(mask, live, other)
                mask |= 1 << other
                added |= 1 << other
                peak = max(peak, during) if moves else during
                moves.append(other)
        return _Taken(peak, live, added, tuple(moves))

    def lower_bound(self, given: Sequence[int]) -> int:
        """What must be alive at some operation in any order: what it touches, and what crosses it.

        `given` is what is alive at each operation in the order given: the operations with most are looked at first.
        """
        count = len(self.before)
        above, below = list(self.before), [0] * count
        for operation in range(count):
            for other in self.problem.after[operation]:
                above[operation] |= above[other]
        for operation in reversed(range(count)):
            for other in self.next[operation]:
                below[operation] |= below[other] | 1 << other
        sizes, pinned = self.problem.sizes, self.problem.pinned
        bound = sum(sizes[storage] for storage in pinned if self.touchers[storage])
        for operation in sorted(range(count), key=lambda k: -given[k]):
            if bound >= given[operation]:
                break  # the bound of an operation is at most what is alive at it in the order given
            here, up, down = 1 << operation, above[operation], below[operation]
            total, taken = self.problem.workspace[operation], self.takes[operation]
            for storage, touchers in enumerate(self.touchers):
                if touchers & here or (touchers & up and (storage in pinned or touchers & down)):
                    total += sizes[storage]
            if taken != -1:
                total -= sizes[taken]
            bound = max(bound, total)
        return bound


class _State(NamedTuple):
    """A downset on a path: what has run, what is alive, what may run next, and how the path came here."""

    mask: int
    live: int
    ready: tuple[int, ...]
    peak: int
    moves: tuple[int, ...]  # run since the parent
    parent: _State | None


def _start(graph: _Graph, floor: int) -> _State:
    ready = tuple(k for k, before in enumerate(graph.before) if not before and not graph.lazy[k])
    lazy = sum(1 << k for k, waits in enumerate(graph.lazy) if waits)
    ready += tuple(k for k, before in enumerate(graph.before) if before and not before & ~lazy)
    return _State(0, 0, tuple(sorted(ready)), floor, (), None)


def _after(graph: _Graph, state: _State, operation: int, mask: int) -> tuple[int, ...]:
    """What may run after `operation`: what could before, and its successors that wait for lazy ones at most."""
    lazy, new = graph.lazy, []
    for successor in graph.next[operation]:
        missing = graph.before[successor] & ~mask
        while missing:
            lowest = (missing & -missing).bit_length() - 1
            if not lazy[lowest]:
                break
            missing &= missing - 1
        if not missing:
            new.append(successor)
    return tuple(sorted({*state.ready, *new} - {operation}))


def _settle(graph: _Graph, state: _State) -> _State:
    """Make every move that fits below the state's peak and leaves no more alive than before."""
    moved = True
    while moved:
        moved = False
        spare = state.peak - state.live
        for operation in state.ready:
            peak, live, ran, moves = graph.taken(state.mask, operation)
            if live <= 0 and peak <= spare:
                mask = state.mask | ran
                ready = _after(graph, state, operation, mask)
                state = _State(mask, state.live + live, ready, state.peak, state.moves + moves, state.parent)
                moved = True
                break
    return state


def _children(graph: _Graph, state: _State, limit: int) -> list[_State]:
    """The states one move on whose peaks are below `limit`."""
    found = []
    for operation in state.ready:
        above, live, ran, moves = graph.taken(state.mask, operation)
        peak = max(state.live + above, state.peak)
        if peak < limit:
            mask = state.mask | ran
            ready = _after(graph, state, operation, mask)
            found.append(_State(mask, state.live + live, ready, peak, moves, state))
    return found


def _beam(graph: _Graph, floor: int, limit: int, width: int) -> Order | None:
    """The best order below `limit` that keeping the `width` best states at each depth finds."""
    start = _settle(graph, _start(graph, floor))
    depths: dict[int, dict[int, _State]] = {start.mask.bit_count(): {start.mask: start}}
    best: _State | None = None
    while depths:
        level = sorted(depths.pop(min(depths)).values(), key=lambda state: (state.peak, state.live, state.mask))
        for state in level[:width]:
            if state.mask == graph.full and state.peak < limit:
                best, limit = state, state.peak
            for child in _children(graph, state, limit):
                child = _settle(graph, child)
                states = depths.setdefault(child.mask.bit_count(), {})
                if child.mask not in states or child.peak < states[child.mask].peak:
                    states[child.mask] = child
    return None if best is None else _finished(graph, best)


def _exact(graph: _Graph, floor: int, limit: int, effort: int) -> tuple[Order | None, int]:
    """The best order below `limit`, if the effort suffices to find one, and the lower bound that was proved."""
    start = _start(graph, floor)
    tie = 0
    heap: list[tuple[int, int, int, _State]] = [(start.peak, 0, tie, start)]
    reached: dict[int, int] = {}
    while heap:
        peak, _, _, state = heapq.heappop(heap)
        if effort <= 0:
            return None, peak
        state = _settle(graph, state)
        if state.mask == graph.full:
            return _finished(graph, state), peak
        if reached.get(state.mask, limit) <= peak:
            continue
        reached[state.mask] = peak
        children = _children(graph, state, limit)
        effort -= len(state.ready) + 1
        for child in children:
            if reached.get(child.mask, limit) > child.peak:
                tie += 1
                heapq.heappush(heap, (child.peak, -child.mask.bit_count(), tie, child))
    return None, limit


def _finished(graph: _Graph, state: _State) -> Order:
    steps: list[int] = []
    here: _State | None = state
    while here is not None:
        steps[:0] = here.moves
        here = here.parent
    peak = max(live_bytes(graph.problem, steps), default=0)
    return Order(tuple(steps), peak, 0)
