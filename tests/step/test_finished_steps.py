"""Finished steps on disk: what is put is got, and records of another form are absent."""

from __future__ import annotations

import json

import pytest

from memopt.cuda_graphs.signature import StepSignature
from memopt.cuda_graphs.trial import Gain
from memopt.step.backward_entry import BackwardFacts
from memopt.step.graph_peaks import GraphPeaks
from memopt.step.warm_start import FinishedStep, FinishedSteps
from tests.report.samples import report


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path / "memopt"))


def _settlement():
    return FinishedStep(
        report=report(), graph="f" * 8, plain=9, constants=1, whole=10, limit=7, margin=0, aside=0, libraries=0,
        multiplies=True, written=(3, 5), full_speed=True, peaks=GraphPeaks(5, 6, 3, 2, (("a", 2),)),
        eager=GraphPeaks(7, 9, 4, 2), gain=Gain.TIME, signature=StepSignature(frozenset({1, 2}), 1, 3, (-1, 2)),
        backward=BackwardFacts(2, ((0, 1), None), ((3, "parameter 'a'"),)),
    )  # fmt: skip


def test_what_is_put_is_got():
    assert FinishedSteps().put("key", _settlement())
    assert FinishedSteps().get("key") == _settlement()
    assert FinishedSteps().get("another") is None


@pytest.mark.parametrize(
    "change",
    [
        {"report": "AAAA"}, {"report": 3}, {"limit": "7"}, {"limit": 1 << 60}, {"plain": True}, {"written": ["a"]},
        {"written": 3}, {"multiplies": 1}, {"graph": None}, {"more": 1}, {"whole": None}, {"gain": "PLEASURE"},
        {"full_speed": 1}, {"gain": None}, {"signature": None}, {"signature": [[1], 2, 3]},
        {"signature": [[-1], 1, 3, []]}, {"signature": [["a"], 1, 3, []]}, {"peaks": [1, 2, 3]},
        {"eager": [1, -2, 3, 4, []]},
        {"peaks": [1, 2, 3, "a", []]},
    ],
)  # fmt: skip
def test_records_of_another_form_are_absent(change, tmp_path):
    FinishedSteps().put("key", _settlement())
    (path,) = (tmp_path / "memopt" / "steps").rglob("*.json")
    value = json.loads(path.read_text())["value"]
    steps = FinishedSteps()
    steps._store.put(steps._scope, "key", {**value, **change})
    assert steps.get("key") is None
