"""The plans of one graph on their way to code: what becomes code at all, and nothing becomes it twice."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from torch import fx

from memopt.capture.dynamo import Hooks, compilation_of
from memopt.inductor.partition import cut_as_planned
from memopt.inductor.peak_estimate import expected_bytes
from memopt.inductor.peak_lower_bound import peak_lower_bound
from memopt.program import Program
from memopt.step.plan_feedback import corrected_by, leaves_much
from memopt.step.plan_request import PlanRequest
from memopt.step.planned import fingerprint

# Code of a plan took up to 6 % more than is expected of its two graphs, for transformers.
_EXPECTED = 0.95
# A plan that was made for more bytes, and takes at most budget / _WORTH more, is not worth code.
_WORTH = 100
# How often a plan is made for more room before there is code.
_PLANS = 5

T = TypeVar("T")


class KnownPlan(Exception):
    """Raised where a plan comes out as one did that became code, or hardly uses more room: there is nothing to make."""


class Plans(Generic[T]):
    """The plans of one graph for one limit.

    Attributes:
        code: what came of the plan of the last cut, as its owner puts it here, or of the known plan.
        same: whether the plan that is known is the very plan of the last cut, and not only as good.
    """

    def __init__(self, hooks: Hooks, request: PlanRequest, known: dict[str, T] | None = None) -> None:
        """Nothing is planned yet.

        Args:
            hooks: what rewrites the joint graph.
            request: what is asked of the plans; its correction is changed here.
            known: code of plans of the same graph for other limits; what is made for this one is put there as well.
        """
        self._hooks, self._request = hooks, request
        self._known: dict[str, T] = {}
        self._elsewhere = {} if known is None else known
        self._last, self.same = "", True
        self._room: dict[str, tuple[int, int]] = {}  # what plans were corrected by, and their bytes
        self._expected = 0  # bytes that forward and backward graph of the last partition are expected to take
        self._factor: float | None = None  # what code took of that, at most, once there is some

    @property
    def code(self) -> T | None:
        """What became of the last plan; None as long as there is nothing."""
        return self._known.get(self._last)

    @code.setter
    def code(self, made: T) -> None:
        self._known[self._last] = self._elsewhere[self._last] = made

    def took(self, size: int) -> None:
        """Learn that the code of the last cut takes so many bytes."""
        if self._expected:
            self._factor = max(self._factor or 0.0, size / self._expected)

    def cut(self, joint: fx.GraphModule, *, foresee: bool, num_fwd_outputs: int, **options: Any) -> Any:
        """Both graphs by the plan that is requested.

        A plan is made for less room as long as its code is expected to take more than the budget, and the first one
        for more room as long as that leaves much of it: the code itself would tell no more, but later.

        Args:
            joint: the graph as a partitioner receives it.
            foresee: whether to do so.
            num_fwd_outputs: how many leading outputs belong to forward.
            options: what else a partitioner is given.

        Raises:
            KnownPlan: `code` is what came of the same plan, or is as good.
            BudgetError: no code keeps the budget, and less may be planned for.
        """
        session = compilation_of(self._hooks)
        more = not self._known and self._request.correction == 0
        self._last, graphs = "", None
        for left in reversed(range(_PLANS)):
            program = self._hooks.rewrite(joint, num_fwd_outputs, self._request)
            key = _key(program)
            asked, taken = self._room[key] = self._request.correction, session.judged_as(0)[0]
            if key in self._elsewhere:
                self._known[key] = self._elsewhere[key]
            for known in (key, *self._known) if key in self._known else self._known:
                before, size = self._room[known]
                if key == known or (asked > before and taken - size < session.limit_bytes // _WORTH):
                    self._last, self.same = known, key == known
                    raise KnownPlan
            if graphs is not None and key == self._last:
                break
            self._last = key
            graphs = cut_as_planned(self._hooks, program, num_fwd_outputs, **options)
            forward, backward = graphs
            if session.one_graph and not session.feasible:
                session.fallbacks.raise_if_hopeless(session, peak_lower_bound(forward, backward, num_fwd_outputs))
            self._expected = expected = expected_bytes(forward, backward, num_fwd_outputs)
            if not (left and foresee and session.one_graph):
                break
            saving, excess = session.judged_as(int(expected * (self._factor or 1.0)))
            if excess is not None and excess > 0 and session.feasible:
                more, correction = False, corrected_by(saving, excess)
                if correction >= self._request.correction:
                    break
            else:
                saving, excess = session.judged_as(int(expected / _EXPECTED))
                if not more or excess is None or saving <= self._request.correction or not leaves_much(session, excess):
                    break
                correction = saving
            self._request.correction = correction
            session.forget_plan()
        return graphs


def _key(program: Program) -> str:
    """What the code of a planned program goes by: the graph, and what is stored of it."""
    stored = [node.name for node in program.calls if node.meta.get("stored")]
    return f"{fingerprint(program)} {stored}"
