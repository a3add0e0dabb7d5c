"""Steps that were over their budget with what the loop holds around the model: said once, and planned anew."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Mapping, Sequence

from memopt.budget import format_bytes
from memopt.compilation.session import Session
from memopt.memory.allocator_events import is_profiled
from memopt.step.around import Around
from memopt.step.before_calls import BEFORE
from memopt.step.earlier_calls import Ran
from memopt.step.loop_bytes import Loop, Seen
from memopt.step.other_tensors import LITTLE

log = logging.getLogger("memopt")


class StepsOver:
    """The sessions whose latest steps were over their budget, until they are planned anew.

    Attributes:
        said: the line of the latest of such steps; empty where none was over.
        latest: what has run last with gradients: its session, and the calls of its step.
    """

    def __init__(self) -> None:
        """No step has run."""
        self.said: list[str] = []
        self.latest: tuple[Session, Sequence[Ran]] | None = None
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        # The latest step of each set of graphs, by their keys: the next one may be any of them.
        self._known: weakref.WeakKeyDictionary[Session, dict[tuple[str, ...], Sequence[Ran]]]
        self._known = weakref.WeakKeyDictionary()

    def ran(self, session: Session, calls: Sequence[Ran]) -> None:
        """A call of a session has run with gradients, the latest of these."""
        self.latest = session, calls
        graphs = tuple(graph.key for ran in calls for graph in ran.graphs)
        self._known.setdefault(session, {})[graphs] = [ran.without_programs() for ran in calls]

    def see_apart(self, around: Around, beside: int, session: Session | None) -> None:
        """A call begins: see what the process has held while no graph of the model ran, where that is over the budget.

        Args:
            around: what the loop was seen to hold.
            beside: bytes of other tensors, which a fraction is not of.
            session: of the latest call, where there was none with gradients yet: no fraction is of a step before that.
        """
        before = self._apart(BEFORE.ends(around), beside, session, before=True)
        around.saw_apart(before, self._apart(around.took_after(), beside, session))

    def sees_more(self, seen: Mapping[Session, Seen]) -> None:
        """The loop holds more around the step to come than was known: what is over its budget then is planned anew.

        Before any call with gradients that is what was planned ahead for the loss alone.

        Args:
            seen: what it was seen to hold by now, of each session.
        """
        for session, held in seen.items():
            session.sees(held)
            ahead = self.latest is None and session.fallbacks.by_loss_alone.has_seen
            if ahead or any(session.excess_around(calls)[0] for calls in self._known.get(session, {}).values()):
                self._sessions.add(session)

    def _apart(self, most: int, beside: int, session: Session | None, *, before: bool = False) -> int:
        """What of these bytes counts, where they are over the budget of the latest step; else 0.

        Args:
            most: that the process has held at once while no graph of the model ran.
            beside, session: as of `see_apart`.
            before: whether that was before the model's calls, as its steps are known to have it.
        """
        session = session if self.latest is None else self.latest[0]
        if session is None or (self.latest is None and not session.counts_all):
            return 0
        if most and not session.counts_all:  # a few bytes of others are not counted
            most -= beside + LITTLE
            session.reference.rests(most, of_all=before)
        limit = session.usable_limit if session.counts_all or session.reference.whole else None
        return most if limit is not None and most > limit else 0

    def look(
        self, session: Session, seen: Seen, calls: Sequence[Ran], loop: Loop | None = None, beside: Sequence[Ran] = ()
    ) -> None:
        """Say that a step of these calls was over its budget, if it was with what is known of the loop around it.

        Args:
            session: of the calls.
            seen: what the loop was seen to hold around them, at most.
            calls: of the step.
            loop: what it held in this step, where that is not known yet.
            beside: calls of other models of the budget that waited as the last of these returned.
        """
        session.sees(seen)
        if loop is not None and session.sees_loop(calls, loop, beside):
            self._sessions.add(session)
        excess, limit = session.excess_around(calls)
        if excess:
            budget, more = format_bytes(limit, short=True), format_bytes(excess, short=True)
            why = [f"the loop around the model holds {seen}"] if str(seen) else []
            if session.fell(limit) > 0:
                why = ["eager itself takes less in this loop than was supposed", *why]
            line = f"a step was over its budget of {budget} by {more}: {'; '.join(why)}"
            line += "; the next step is planned with that"
            if line not in self.said:
                log.warning("memopt: %s: %s", session.model_name, line)
            self.said[:] = [line]
            session.note(line)
        if not excess and not session.planned_with.known:  # what calls let go of as the loop was not known is held next
            excess, _ = session.excess_around([ran.as_planned for ran in calls])
        if excess:
            self._sessions.add(session)

    def due(self) -> Collection[Session]:
        """The sessions to be planned anew before the next step; they are due once.

        Beside a profiler nothing can be measured, and so nothing planned: they are due when it has ended.
        """
        if not self._sessions or is_profiled():
            return ()
        due = list(self._sessions)
        self._sessions.clear()
        return due

    def forget(self) -> None:
        """All is planned anew; what was said stays."""
        self.latest = None
        self._known.clear()
        self._sessions.clear()
