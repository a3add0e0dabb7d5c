"""When a step is planned anew, with what, and when its budget is refused."""

import contextlib
import dataclasses
from types import SimpleNamespace

import pytest

from memopt.budget import BudgetError
from memopt.compilation import plan_together as together
from memopt.step.plan_request import PlanRequest
from memopt.step.planner import StepPlan
from memopt.step.search_result import SearchResult

LIMIT = 100


@dataclasses.dataclass
class Search:
    """Plans of these peaks, one after the other."""

    peaks: list
    captured: tuple = ()
    searches: int = 0
    fused: bool = False

    @property
    def stages(self):
        return SimpleNamespace(searched=True, arranges=False, fusion=self.fused or None)

    def plan(self, room, carried, prove):
        peak = self.peaks.pop(0)
        return SearchResult([], StepPlan((), peak, peak, peak <= room), (), proved=True)


class Session:
    """What planning asks of a session, with notes of what it told it."""

    notes = ()
    record = SimpleNamespace(at_once=True)
    rewriting = SimpleNamespace(arranges_no_more=lambda stages: stages.arranges)
    resident = SimpleNamespace(total=10)
    sizes = SimpleNamespace(
        exhausted=False, proposal=lambda *_: None, keep=lambda *_, **__: None, serves=lambda *_: True
    )

    def __init__(self, *peaks, aside=0, counted=(), soft=False, fused=False):
        self.found, self.aside, self.counted = Search([*peaks], fused=fused), aside, [*counted]
        self.soft, self.told = soft, []

    def count_libraries(self, programs):
        return self.counted.pop(0) if self.counted else False

    def search_of(self, keys, programs):
        return self.found

    def usable(self, limit):
        return limit - self.aside

    def plans_anew(self):
        anew, self.aside = self.aside > 0, 0
        return anew

    def aim_no_more(self):
        aimed, self.soft = self.soft, False
        return aimed

    @contextlib.contextmanager
    def operator_by_operator(self):
        self.told.append("operator by operator")
        self.found.fused = False
        yield

    def plans(self, step, stages, measured):
        self.told.append(("plans", step.plan.peak_bytes))

    def stands(self, step, *, searched):
        assert searched
        self.told.append(("stands", step.plan.peak_bytes))

    def over(self, needed, limit):
        return BudgetError(needed, limit, None)

    def optimizer_peak(self):
        return 0

    def held_to(self, whole):
        return LIMIT

    def prepare_allocator(self):
        pass

    def sees_step(self, *_):
        return 200

    def reserves_for_capture(self, *_):
        pass


@pytest.fixture(autouse=True)
def _no_graphs(monkeypatch):
    monkeypatch.setattr(together, "predicted_peak", lambda planned: 0)
    monkeypatch.setattr(together, "measured_peak", lambda planned, peak: 0)
    monkeypatch.setattr(together, "carried_from", lambda *_: None)


def test_a_plan_within_the_budget_stands():
    session = Session(90)
    together.plan_together(session, [], PlanRequest())
    assert session.told == [("plans", 90), ("stands", 90)]


def test_what_was_left_for_a_recording_is_planned_with_before_a_budget_is_refused():
    session = Session(90, 85, aside=20)
    together.plan_together(session, [], PlanRequest())
    assert session.told == [("plans", 85), ("stands", 85)]


def test_what_libraries_keep_of_a_rewritten_graph_is_planned_with():
    session = Session(90, 80, counted=[False, True])
    together.plan_together(session, [], PlanRequest())
    assert session.told == [("plans", 80), ("stands", 80)]


def test_figures_of_fused_code_refuse_nothing():
    session = Session(120, 70, fused=True)
    together.plan_together(session, [], PlanRequest())
    assert session.told == [("plans", 120), "operator by operator", ("plans", 70), ("stands", 70)]


def test_what_was_only_aimed_at_is_given_up():
    session = Session(120, 60, soft=True)
    together.plan_together(session, [], PlanRequest())
    assert session.told == [("plans", 120), ("plans", 60), ("stands", 60)]


def test_a_budget_that_no_plan_keeps_is_refused_with_what_it_needs():
    session = Session(120)
    with pytest.raises(BudgetError) as error:
        together.plan_together(session, [], PlanRequest())
    assert error.value.minimum_bytes == 130 and session.told == [("plans", 120)]


def test_an_engine_whose_code_has_the_last_word_is_not_refused():
    session = Session(120)
    together.plan_together(session, [], PlanRequest(), by_timeline=False)
    assert session.told == [("plans", 120), ("stands", 120)]
