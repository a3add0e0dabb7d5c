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

    @property
    def programs(self):
        return [SimpleNamespace(kind=self.kind)]


@pytest.fixture
def seen(monkeypatch):
    """Shows a report as that of the latest compilation."""
    monkeypatch.setattr(training_report, "calls_of", lambda stand_in: stand_in)
    kept = TrainingReport()

    def show(told):
        stand_in = SimpleNamespace(sessions=SimpleNamespace(told=told), report=told)
        kept.see(stand_in)
        return kept.of(stand_in)

    return show


def test_the_largest_step_is_told_with_the_notes_of_all(seen):
    assert seen(None) is None
    assert seen(Report(5, ("a",))) == Report(5, ("a",))
    assert seen(Report(9, ("b",))) == Report(9, ("b",))
    assert seen(Report(3, ("b", "c"))) == Report(9, ("b", "c"))


def test_inference_is_told_of_where_there_was_no_step_alone(seen):
    assert seen(Report(7, kind="inference")).peak_bytes == 7
    assert seen(Report(5)).peak_bytes == 5
    assert seen(Report(7, kind="inference")).peak_bytes == 5
