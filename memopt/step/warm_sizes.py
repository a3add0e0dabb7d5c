"""Warm starts of code for many sizes: what it was counted to take at which sizes, from one process to the next."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from memopt.memory.allocator import with_slack
from memopt.memory.cost.disk import Store
from memopt.step.graph_peaks import step_peak
from memopt.step.keys import versions
from memopt.step.warm_start import FinishedStep, FinishedSteps, taken_up

if TYPE_CHECKING:
    from memopt.capture.dynamo import Hooks
    from memopt.compilation.session import Session

# So many sizes of one graph are remembered, the latest.
_MOST = 64

# The sizes of a call in the order of the graph's inputs.
Counted = tuple[int, ...]


class CountedSizes:
    """What is on disk of one code: the sizes at which it was counted.

    Attributes:
        grows: whether a size covers all smaller ones.
    """

    def __init__(self, key: str, code: str) -> None:
        """Look for what is known.

        Args:
            key: of the graph and all that its code depends on.
            code: a digest of the code.
        """
        self._store, self._key, self._settlements = Store("sizes"), json.dumps([key, code]), FinishedSteps()
        self.grows, self._kept, self._over = self._read()

    def known_to_be_over(self) -> Sequence[Counted]:
        """The sizes at which the code was over the budget."""
        return self._over

    def take_up(self, session: Session, hooks: Hooks, sizes: Counted) -> bool:
        """Let the session stand as where the code was counted at these sizes, or at larger ones that cover them.

        Returns:
            Whether there are such, and the budget is kept here and now; else the session stands as before.
        """
        covering = [kept for kept in self._kept if kept == sizes or (self.grows and _covers(kept, sizes))]
        for kept in sorted(covering, key=sum):
            known = self._settlements.get(self._place(kept))
            if known is not None and _keeps(session, known):
                hooks.knows(known.backward)
                return True
        return False

    def keep(self, sizes: Counted, settlement: FinishedStep, *, grows: bool) -> bool:
        """Remember that the code keeps the budget at these sizes; whether that could be written."""
        if not self._settlements.put(self._place(sizes), settlement):
            return False
        return self._put(grows, kept=sizes)

    def refuse(self, sizes: Counted, *, grows: bool) -> bool:
        """Remember that it does not; whether that could be written."""
        return self._put(grows, over=sizes)

    def _put(self, grows: bool, *, kept: Counted | None = None, over: Counted | None = None) -> bool:
        before = self._read()[1:]  # other processes may have counted others meanwhile
        lists = []
        for known, new in zip(before, (kept, over), strict=True):
            lists.append([*(each for each in known if each != new), *([] if new is None else [new])][-_MOST:])
        self.grows, self._kept, self._over = grows, *lists
        return self._store.put(versions(), self._key, {"grows": grows, "kept": lists[0], "over": lists[1]})

    def _read(self) -> tuple[bool, list[Counted], list[Counted]]:
        record = self._store.get(versions(), self._key) or {}
        lists = [_counted(record.get(name)) for name in ("kept", "over")]
        return record.get("grows") is True, lists[0], lists[1]

    def _place(self, sizes: Counted) -> str:
        return json.dumps([self._key, *sizes])


def _keeps(session: Session, known: FinishedStep) -> bool:
    """Whether the budget is kept here, by what inputs, the loop and a fraction of it are now."""
    before = session.margin, session.report, session.step, list(session.notes)
    others = session.multiplies, session.capture_reserve.bytes, session.resident
    same = taken_up(session, known)
    step = session.step
    assert step is not None and step.known is not None and session.report is not None
    with session.around_graphs():
        own = step_peak([step.known[0]])
    taken = max(step.base + own, session.optimizer_peak())
    limit = session.limit_bytes
    if limit and taken <= session.usable(limit):
        session.report = dataclasses.replace(session.report, notes=tuple(session.notes))
        if not same or taken > session.report.peak_bytes:
            least = with_slack(taken, session.resident.device)
            session.report = dataclasses.replace(
                session.report, budget_bytes=limit, peak_bytes=taken, minimum_bytes=least
            )
        return True
    session.loosen(before)
    session.multiplies, reserved, session.resident = others
    session.capture_reserve.restore(reserved)
    return False


def _covers(larger: Counted, sizes: Counted) -> bool:
    return len(larger) == len(sizes) and all(size <= most for size, most in zip(sizes, larger, strict=True))


def _counted(found: object) -> list[Counted]:
    """Sizes as read; none where they are of another form."""
    if not isinstance(found, list) or len(found) > _MOST:
        return []
    if not all(isinstance(each, list) and all(type(size) is int and size >= 0 for size in each) for each in found):
        return []
    return [tuple(each) for each in found]
