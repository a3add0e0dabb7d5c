"""What is known of a comparison while its processes run, in whatever order they end."""

import itertools
from pathlib import Path

import pytest
import torch

from memopt.comparison.job import Job, Source
from memopt.comparison.progress import Case, Progress
from memopt.comparison.steps import Engine
from memopt.comparison.truth import Values

SAID = {"kind": "row", "seconds": [0.1, 0.2], "first_seconds": 1.0, "notes": ["so"]}


@pytest.fixture
def model(tmp_path):
    job = Job(Source("nothing:made"), "", True, "cpu")
    return Progress(Case("net", job, (Engine("eager"), Engine("aten", "8GB"))), tmp_path / "model")


def computed(job, scale=1.0):
    Values([torch.ones(2).double() * scale], {"w": torch.ones(3).double()}).save(job.values)
    return job


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_errors_are_found_as_soon_as_both_sides_are_there(model, order):
    truth, eager, aten = jobs = [computed(job, scale) for job, scale in zip(model.jobs(), (1, 1, 1.5), strict=True)]
    assert [job.engine for job in jobs] == ["", "eager", "aten:8GB"]
    said = ({"random": False}, SAID, SAID)
    assert not any(model.take(jobs[index], said[index]) for index in order)
    assert [(row.name, row.error, row.gradient_error) for row in model.rows] == [("eager", 0, 0), ("aten:8GB", 0.5, 0)]
    assert model.rows[0].seconds == (0.1, 0.2) and not model.notes
    assert Path(truth.values).exists() and not Path(eager.values).exists() and not Path(aten.values).exists()


@pytest.mark.parametrize("truth_first", [True, False])
def test_a_random_step_is_compared_in_eval_mode_by_a_process_more(model, truth_first):
    truth, eager, aten = map(computed, model.jobs())
    ended = [(truth, {"random": True}), (eager, SAID), (aten, {"kind": "row", "reason": "died"})]
    new = [job for pair in (ended if truth_first else reversed(ended)) for job in model.take(*pair)]
    (again,) = new  # none for what did not run
    assert again.engine == "eager" and again.eval_gradients and again.values != eager.values
    assert model.rows[0].error is None and "eval mode" in model.notes[0]
    model.take(computed(again, 2.0), {"kind": "row"})
    assert model.rows[0].error == 1.0 and model.rows[0].seconds == (0.1, 0.2) and model.rows[1].reason == "died"


def test_why_an_error_is_not_known_is_a_note(model):
    truth, eager, _ = map(computed, model.jobs())
    model.take(truth, {"random": True})
    (again,) = model.take(eager, SAID)
    model.take(again, {"kind": "row", "reason": "no result within 3 s"})
    assert model.rows[0].notes == ("so", "its error is not known: no result within 3 s")
    assert [row.name for row in model.rows] == ["eager"]  # the other has not ended


def test_other_results_than_the_models_are_a_note(model):
    truth, eager, _ = map(computed, model.jobs())
    model.take(truth, {"random": False})
    Values([torch.ones(2)], {}).save(eager.values)
    model.take(eager, SAID)
    assert "other results" in model.rows[0].notes[-1] and model.rows[0].error is None


def test_without_a_truth_no_error_is_known(model):
    truth, eager, _ = map(computed, model.jobs())
    assert not model.take(truth, {"kind": "row", "reason": "out of memory"}) and not model.take(eager, SAID)
    assert model.notes == ("errors are not known: no float64 reference (out of memory)",)
    assert model.rows[0].error is None
