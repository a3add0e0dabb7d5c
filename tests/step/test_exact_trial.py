"""Trial steps of what runs operator by operator: when they are taken, and what a refusal makes of them."""

import dataclasses
from types import SimpleNamespace

import pytest

from memopt.budget import BudgetError
from memopt.step import exact_trial
from memopt.step.exact_trial import refused_as_tried, tried_as_is


@dataclasses.dataclass(frozen=True)
class Planned:
    """A graph whose plan takes so many bytes, and its run seven more."""

    measured: int | None = None
    timeline = SimpleNamespace(peak_bytes=50)
    program = None


@pytest.fixture(autouse=True)
def _figures(monkeypatch):
    monkeypatch.setattr(exact_trial, "tried", lambda planned: dataclasses.replace(planned, measured=57))
    monkeypatch.setattr(exact_trial, "collect", lambda: None)
    monkeypatch.setattr(exact_trial, "live_bytes", lambda device: 35)
    monkeypatch.setattr(exact_trial, "bytes_beside", lambda program: 5)
    monkeypatch.setattr(exact_trial, "measured_peak", lambda planned, default: max(item.measured for item in planned))
    monkeypatch.setattr(exact_trial, "predicted_peak", lambda planned: 50)


def session_with(*planned, verify=True, exact=True, limit=100, older=0, uncounted=0):
    return SimpleNamespace(
        verify=verify, exact=exact, limit=lambda default: limit, usable=lambda limit: limit - 10,
        resident=SimpleNamespace(total=40, device="cpu"), older=lambda: older, uncounted=lambda: uncounted,
        step=SimpleNamespace(planned=planned),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "tried"),
    [
        ({}, True),
        ({"limit": None}, True),
        ({"verify": False}, False),
        ({"exact": False}, False),
        ({"limit": 99}, False),
        ({"older": 1}, False),
    ],
    ids=["within", "no limit", "not verified", "code", "over", "over beside outputs of the step before"],
)
def test_a_run_is_taken_where_it_says_something_and_fits(facts, tried):
    assert (tried_as_is(session_with(**facts), Planned()).measured is not None) == tried


@pytest.mark.parametrize(("live", "uncounted", "tried"), [(36, 0, False), (36, 1, True)])
def test_a_run_fits_beside_what_is_there_now(monkeypatch, live, uncounted, tried):
    """Calls that waited for their backward were not counted where a step is planned whole: 1.35 of a budget."""
    monkeypatch.setattr(exact_trial, "live_bytes", lambda device: live)
    found = tried_as_is(session_with(uncounted=uncounted), Planned())
    assert (found.measured is not None) == tried


def test_a_refusal_names_no_less_than_the_run_takes():
    refused = BudgetError(1000, 900)
    found = refused_as_tried(session_with(Planned()), refused)
    assert (found.minimum_bytes, found.budget_bytes) == (1007, 900)


def test_a_refusal_stays_where_a_run_tells_nothing_new(monkeypatch):
    refused = BudgetError(1000, 900)
    for session in (
        session_with(),
        session_with(Planned(measured=57)),
        session_with(Planned(), exact=False),
        session_with(Planned(), verify=False),
    ):
        assert refused_as_tried(session, refused) is refused
    monkeypatch.setattr(exact_trial, "predicted_peak", lambda planned: 57)
    assert refused_as_tried(session_with(Planned()), refused) is refused
