"""The report of a whole run: of its largest training step."""

import dataclasses
from types import SimpleNamespace

import pytest

from memopt.integrations import training_report
from memopt.integrations.training_report import TrainingReport


@dataclasses.dataclass(frozen=True)
class Report:
    peak_bytes: int
    notes: tuple = ()
    kind: str = "training"
    unconstrained: int | None = None
    budget_bytes: int = 10

    @property
    def unconstrained_bytes(self):
        return self.peak_bytes if self.unconstrained is None else self.unconstrained

    @property
    def programs(self):
        return [SimpleNamespace(kind=self.kind)]


@pytest.fixture
def seen(monkeypatch):
    """Shows reports as those of a model's compilations, the last one of the latest call."""
    monkeypatch.setattr(training_report, "calls_of", lambda stand_in: stand_in)
    kept = TrainingReport()

    def show(*told):
        sessions = {number: SimpleNamespace(report=report) for number, report in enumerate(told)}
        stand_in = SimpleNamespace(sessions=sessions, report=told[-1])
        kept.see(stand_in)
        return kept.of(stand_in)

    return show


def test_the_largest_step_is_told_with_the_notes_of_all(seen):
    assert seen(None) is None
    assert seen(Report(5, ("a",))) == Report(5, ("a",))
    assert seen(Report(9, ("b",))) == Report(9, ("b",))
    assert seen(Report(3, ("b", "c"))) == Report(9, ("b", "c"))


@pytest.mark.parametrize("later", [Report(6, unconstrained=20), Report(5, unconstrained=12, budget_bytes=6)])
def test_of_a_step_that_was_planned_anew_the_latest_plan_is_told(later, seen):
    assert seen(Report(9, unconstrained=20)).peak_bytes == 9
    assert seen(later) == later
    assert seen(Report(4, unconstrained=8, budget_bytes=later.budget_bytes)) == later


def test_inference_is_told_of_where_there_was_no_step_alone(seen):
    assert seen(Report(7, kind="inference")).peak_bytes == 7
    assert seen(Report(5)).peak_bytes == 5
    assert seen(Report(7, kind="inference")).peak_bytes == 5


def test_a_step_whose_last_call_is_one_of_inference_is_a_training_step(seen):
    """As with a reference model that is the trained one without its adapters."""
    assert seen(None, Report(5), Report(7, kind="inference")).peak_bytes == 5
    assert seen(Report(9), Report(4), Report(7, kind="inference")).peak_bytes == 9
