"""What to save when saving has a price: a minimum cut between what forward makes and what backward needs."""

from __future__ import annotations

from memopt.solve.rollout import Rollout

_SCALE = 1 << 44  # capacities are integers, so that cuts are exact: the costs of all operations add up to this
_ENDLESS = 1 << 80


class SavingCut:
    """Minimizes Σ price over saved storages + Σ cost over recomputed operations.

    Every storage that backward reads is saved, or recomputed by its operation from storages that are saved or made
    again. Each operation supplies its cost as flow, each storage lets its price pass; flow ends where backward reads.
    Prices only rise from call to call: the flow found for one set of prices is the start for the next.
    """

    def __init__(self, rollout: Rollout) -> None:
        problem = rollout.problem
        self._forward = forward = problem.forward
        self._storages = len(problem.sizes)
        self._producer = problem.producer
        self._unit = _SCALE / max(sum(problem.costs[:forward]), 1e-30)
        self._ends = [False] * (forward + self._storages)  # operations, then storages: whether flow ends at the node
        waiting = []
        for storage in {read for reads in problem.reads[forward:] for read in reads}:
            if 0 <= problem.producer[storage] < forward and not rollout.fixed[storage]:
                self._ends[forward + storage] = True
                waiting.append(storage)
        self.needed = frozenset(waiting)
        self._arcs: list[list[int]] = [[] for _ in self._ends]
        self._to: list[int] = []
        self._left: list[int] = []
        self._toll: list[tuple[int, int]] = []  # (arc, storage) whose capacity follows the price
        self._granted: list[int] = []
        seen: set[int] = set()
        while waiting:
            storage = waiting.pop()
            if storage in seen:
                continue
            seen.add(storage)
            operation = problem.producer[storage]
            self._toll.append((self._arc(operation, forward + storage, 0), storage))
            for read in problem.reads[operation]:
                if not rollout.fixed[read]:
                    waiting.append(read)
                    if not self._ends[forward + read]:
                        self._arc(forward + read, operation, _ENDLESS)
        self._granted = [0] * len(self._toll)
        operations = {problem.producer[storage] for storage in seen}
        self._supply = {operation: 1 + int(problem.costs[operation] * self._unit) for operation in sorted(operations)}

    def solve(self, prices: list[float]) -> list[bool]:
        """Return per storage whether to save it, when that costs `prices` (seconds, or the highest price so far)."""
        for at, (arc, storage) in enumerate(self._toll):
            capacity = max(int(prices[storage] * self._unit), self._granted[at])
            self._left[arc] += capacity - self._granted[at]
            self._granted[at] = capacity
        cut_off = [False] * len(self._ends)  # nodes from which no more flow can pass
        for operation in self._supply:
            while self._supply[operation] and not cut_off[operation]:
                self._push(operation, cut_off)
        saved = [False] * self._storages
        for _, storage in self._toll:
            node = self._forward + storage
            saved[storage] = cut_off[self._producer[storage]] and (self._ends[node] or not cut_off[node])
        return saved

    def _arc(self, start: int, end: int, capacity: int) -> int:
        arc = len(self._to)
        self._to += [end, start]
        self._left += [capacity, 0]
        self._arcs[start].append(arc)
        self._arcs[end].append(arc + 1)
        return arc

    def _push(self, operation: int, cut_off: list[bool]) -> None:
        """Send flow from an operation along one path; where there is none, mark all that it reaches as cut off."""
        to, left, ends, arcs = self._to, self._left, self._ends, self._arcs
        came = {operation: -1}
        stack = [operation]
        while stack:
            node = stack.pop()
            for arc in arcs[node]:
                after = to[arc]
                if left[arc] and after not in came and not cut_off[after]:
                    came[after] = arc
                    if ends[after]:
                        self._send(operation, after, came)
                        return
                    stack.append(after)
        for node in came:
            cut_off[node] = True

    def _send(self, operation: int, node: int, came: dict[int, int]) -> None:
        path = []
        while node != operation:
            path.append(came[node])
            node = self._to[came[node] ^ 1]
        amount = min(self._supply[operation], *(self._left[arc] for arc in path))
        for arc in path:
            self._left[arc] -= amount
            self._left[arc ^ 1] += amount
        self._supply[operation] -= amount
