"""When a plan is proved and put on record."""

import dataclasses
from types import SimpleNamespace

import pytest

from memopt.compilation import plan_record
from memopt.compilation.plan_record import PlanRecord


@dataclasses.dataclass
class Step:
    planned: tuple
    search: object = None
    lowering: tuple = ()
    whole: int = 300
    base: int = 100
    plan: object = dataclasses.field(default_factory=lambda: SimpleNamespace(peak_bytes=50, minimum_bytes=20, curve=()))


class Search:
    def __init__(self):
        self.asked = 0

    def prove(self, found):
        self.asked += 1
        return SimpleNamespace(planned=[f"{item} proved" for item in found.planned])


@pytest.fixture(autouse=True)
def reports(monkeypatch):
    """What is reported: the graphs, and the peak, minimum, measured and unplanned bytes above what is resident."""
    found = []

    def report(session, planned, *figures):
        found.append((planned, figures[:4]))
        return len(found)

    monkeypatch.setattr(plan_record, "build_report", report)
    return found


def session_with(step, code=None):
    return SimpleNamespace(step=step, report=None, has_code=lambda: code is not None, code_peak=lambda: code)


def test_what_was_put_off_is_proved_once_and_put_on_record(reports):
    search, record = Search(), PlanRecord()
    session = session_with(Step(("graph",), search))
    record.conclude(session)
    record.conclude(session)
    assert search.asked == 1 and session.step.planned == ("graph proved",) and session.step.search is None
    assert reports == [(("graph proved",), (50, 20, None, 200))] * 2 and session.report == 2


def test_where_there_is_code_its_peak_is_on_record_and_no_minimum_below_it(reports):
    PlanRecord().conclude(session_with(Step(("graph",)), code=40))
    assert reports == [(("graph",), (40, 40, None, 200))]


def test_a_stored_report_of_a_warm_start_stands(reports):
    for step in (None, Step(())):
        PlanRecord().conclude(session_with(step))
    assert not reports


def test_what_can_be_made_ahead_is_made_of_the_proved_plan_and_changes_nothing(monkeypatch):
    ahead = []
    monkeypatch.setattr(plan_record, "put_on_record", ahead.extend)
    session, record = session_with(Step(("graph",), Search())), PlanRecord()
    record.prepare(session)
    record.prepare(session_with(None))
    assert ahead == ["graph proved"] and session.step.planned == ("graph",)


def test_it_is_put_off_within_the_block_alone():
    record = PlanRecord()
    with pytest.raises(ValueError), record.put_off():
        assert not record.at_once
        raise ValueError
    assert record.at_once
