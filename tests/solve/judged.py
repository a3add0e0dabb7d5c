"""A search whose every decision, kept or not, is judged as it is played."""

from __future__ import annotations

from hypothesis import strategies as st

from memopt.solve.archive import State
from memopt.solve.check import check
from memopt.solve.problem import StepProblem
from memopt.solve.rollout import FOREVER, Rollout
from memopt.solve.schedule import Schedule
from memopt.solve.search import Search


class JudgedSearch(Search):
    """Refuses a decision that touches what is fixed, and a schedule that the independent checker does not accept."""

    def __init__(self, problem: StepProblem, operations: float = 20_000) -> None:
        """Bound the search by operations, never by the clock."""
        super().__init__(Rollout(problem), 3600, operations)
        self.played: list[State] = []

    def play(self, saved: list[bool], hold: list[int]) -> State:
        """Play, then judge."""
        fixed = self.rollout.fixed
        assert all(days == FOREVER for days, always in zip(hold, fixed, strict=True) if always)
        assert min(hold, default=0) >= 0
        state = super().play(saved, hold)
        check(self.problem, Schedule(tuple(state.outcome.steps), self.problem.forward), state.peak)
        front = self.archive.states
        assert any(other.peak <= state.peak and other.seconds <= state.seconds for other in front)
        self.played.append(state)
        return state


@st.composite
def decisions(draw, problem: StepProblem) -> tuple[list[bool], list[int]]:
    """Draw what to save and how long to hold, leaving alone what is fixed."""
    saved, hold = [], []
    for always in Rollout(problem).fixed:
        saved.append(draw(st.booleans()))
        hold.append(FOREVER if always else draw(st.sampled_from((0, 0, 1, 2, 5, FOREVER))))
    return saved, hold


def front(search: Search) -> list[tuple[int, float]]:
    """Return the peaks and seconds of what the archive holds."""
    return [(state.peak, state.seconds) for state in search.archive.states]


def covers(after: list[tuple[int, float]], before: list[tuple[int, float]]) -> bool:
    """Return whether `after` has, for every point of `before`, one that is worse in neither number."""
    return all(any(a[0] <= b[0] and a[1] <= b[1] for a in after) for b in before)
