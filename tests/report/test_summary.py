"""One line of a report."""

from types import SimpleNamespace

import pytest

from memopt.report.summary import summary


def report(kind="training", **figures):
    figures = {"budget_bytes": None, "measured_peak_bytes": None, **figures}
    return SimpleNamespace(programs=[SimpleNamespace(kind=kind)], peak_bytes=3_000_000, **figures)


def test_a_step_says_what_it_takes_and_how_long_planning_took():
    assert (
        summary(report(), 1.26, gradients=True)
        == "planned, compiled and run a training step in 1.3 s: predicted peak 3.00 MB"
    )


@pytest.mark.parametrize(
    ("figures", "ends"),
    [
        ({"budget_bytes": 4_000_000}, "predicted peak 3.00 MB of a budget of 4.00 MB"),
        ({"measured_peak_bytes": 2_000_000}, "predicted peak 3.00 MB, measured 2.00 MB"),
        ({"budget_bytes": 4_000_000, "measured_peak_bytes": 0}, "of a budget of 4.00 MB, measured 0 B"),
    ],
)
def test_what_is_known_beside_is_said(figures, ends):
    assert summary(report("inference", **figures), 0.0, gradients=False).endswith(ends)
    assert " inference in 0.0 s" in summary(report("inference", **figures), 0.0, gradients=False)


def test_an_evaluation_beside_a_step_is_none():
    assert summary(report(), 1.26, gradients=False) == "compiled and run inference in 1.3 s"
    assert summary(report(budget_bytes=1), 0.0, gradients=False).endswith("s, within the budget of the training step")
