"""How a call that runs eagerly saves less for backward: modules that are checkpointed, so that a limit is kept."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memopt.capture.eager_call import EagerCall
from memopt.capture.module_calls import ModuleCalls
from memopt.solve.module_checkpoints import choices
from memopt.step.loop_bytes import SCALARS
from memopt.step.module_checkpoints import ModuleCall, ModuleCheckpoints

# Sets of modules that are counted, beside subsets of the one that is taken: a count takes about as long as a step.
_SETS = 6
_NAMED = 4  # modules that are named in a line

# Counts a call with something in force around the model's twin; None where it cannot be counted so.
Count = Callable[[Callable[[Any], Any]], EagerCall | None]


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to run a call.

    Attributes:
        calls: of modules that are checkpointed; none: plain eager.
        eager: what it takes so.
    """

    calls: tuple[ModuleCall, ...]
    eager: EagerCall

    def __str__(self) -> str:
        names = collections.Counter(call.name or "the whole model" for call in self.calls)
        shown = [name if count == 1 else f"{name} ({count} calls)" for name, count in list(names.items())[:_NAMED]]
        return ", ".join(shown) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


class EagerLevers:
    """The ways to run one kind of call; each is counted once."""

    def __init__(self, plain: EagerCall, calls: int, before: Way | None = None) -> None:
        """Nothing is counted yet but the plain eager call.

        Args:
            plain: what that takes.
            calls: of the model in a step.
            before: the way that such calls have gone; taken again if it keeps the limit.
        """
        self.plain = Way((), plain)
        self._calls, self._before = calls, () if before is None else before.calls
        self._known: dict[tuple[ModuleCall, ...], Way | None] = {(): self.plain}
        self._refused: set[ModuleCall] = set()
        self._sets: list[tuple[ModuleCall, ...]] | None = None
        self._bytes: dict[ModuleCall, int] = {}  # that are recomputed

    def find(self, needs: Callable[[Way], int], limit: int, count: Count) -> tuple[Way | None, Way]:
        """The way that recomputes least among those that keep a limit, and the one that takes least.

        Args:
            needs: the bytes that a step takes that goes so.
            limit: bytes that it may take.
            count: counts a call.

        Returns:
            None for the first where there is none.
        """
        if needs(self.plain) <= limit:
            return self.plain, self.plain
        before = self._way(self._before, count) if self._before else None
        if before is not None and needs(before) <= limit:
            return before, before
        ways = [self.plain]
        ways += [way for chosen in self._whole_sets(count) if (way := self._way(chosen, count)) is not None]
        least = min(ways, key=needs)
        fitting = [self._part(way, needs, limit, count) for way in ways if needs(way) <= limit]
        return min(fitting, key=self._cost, default=None), least

    def _part(self, way: Way, needs: Callable[[Way], int], limit: int, count: Count) -> Way:
        """The first of its modules alone, where they are enough: backward ends with them, after all others."""
        best, low, high = way, 0, len(way.calls)
        while high - low > 1:
            middle = (low + high) // 2
            part = self._way(way.calls[:middle], count)
            if part is not None and needs(part) <= limit:
                best, high = part, middle
            else:
                low = middle
        return best

    def _cost(self, way: Way) -> int:
        return sum(self._bytes.get(call, 0) for call in way.calls)

    def _whole_sets(self, count: Count) -> list[tuple[ModuleCall, ...]]:
        if self._sets is None:
            seen = ModuleCalls()
            self._sets = []
            if count(seen.watching) is not None:
                calls, nested = seen.found()
                self._bytes = {call: item.recomputed for call, item in zip(calls, nested, strict=True)}
                self._sets = [tuple(calls[i] for i in chosen) for chosen in choices(nested, self._calls, _SETS)]
        return self._sets

    def _way(self, calls: Sequence[ModuleCall], count: Count) -> Way | None:
        """The call with these checkpointed, those apart that turn out not to be recomputed the same."""
        while True:
            wanted = tuple(call for call in calls if call not in self._refused)
            if wanted in self._known:
                return self._known[wanted]
            checkpoints = ModuleCheckpoints(wanted)
            found = count(checkpoints.applied)
            if found is not None or checkpoints.last is None or checkpoints.last in self._refused:
                self._known[wanted] = None if found is None else Way(wanted, found)
                return self._known[wanted]
            self._refused.add(checkpoints.last)


def bytes_beside(way: Way, device: torch.device) -> int:
    """Bytes that recomputing takes and fake tensors do not show: scalars, and the state of the random numbers drawn."""
    draws = device.type == "cpu" and any(call.draws for call in way.calls)
    return (SCALARS if way.calls else 0) + (torch.get_rng_state().nbytes if draws else 0)
