from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import memopt
from memopt.backends.inductor import missing_compiler
from memopt.inductor.known_routes import KnownRoutes, Route
from memopt.inductor.training import Training
from memopt.step.warm_start import FinishedSteps

needs_compiler = pytest.mark.skipif(missing_compiler(torch.device("cpu")) is not None, reason="no C++ compiler")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))


def test_what_is_put_is_found_again():
    kept = Route(True, (), -4096)
    assert KnownRoutes().put("key", kept)
    assert KnownRoutes().get("key") == kept
    assert KnownRoutes().get("another") is None


@pytest.mark.parametrize(
    "record",
    [
        {"planned": 1, "lowering": [], "correction": 0},
        {"planned": True, "lowering": "chunk_loss", "correction": 0},
        {"planned": True, "lowering": [3], "correction": 0},
        {"planned": True, "lowering": [], "correction": 0.5},
        {"planned": True, "lowering": [], "correction": 1 << 60},
        {"planned": True, "lowering": []},
        {"planned": True, "lowering": [], "correction": 0, "more": 1},
    ],
)
def test_records_of_another_form_are_absent(record):
    steps = KnownRoutes()
    steps._store.put(steps._scope, "key", record)
    assert steps.get("key") is None


def test_a_damaged_file_is_absent(tmp_path):
    KnownRoutes().put("key", Route(False, ("chunk_loss",)))
    (path,) = tmp_path.rglob("*.json")
    entry = json.loads(path.read_text())
    entry["value"]["planned"] = True
    path.write_text(json.dumps(entry))
    assert KnownRoutes().get("key") is None


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())]
    return nn.Sequential(*layers)


def _first_step(budget):
    """Take a step with nothing in memory; return its attempts, its gradients and its report."""
    torch._dynamo.reset()
    attempts = []
    plain = Training._attempt

    def counted(self, *, planned):
        attempts.append(plain(self, planned=planned))
        return attempts[-1]

    model = _model()
    run = memopt.compile(model, budget, backend="inductor")
    with pytest.MonkeyPatch.context() as patch:  # of its own: the test's undone would take back all fixtures' patches
        patch.setattr(Training, "_attempt", counted)
        patch.setattr(FinishedSteps, "get", lambda self, key: None)  # else nothing would be lowered
        run(torch.linspace(-1, 1, 512 * 64).reshape(512, 64)).square().sum().backward()
    return attempts, [parameter.grad for parameter in model.parameters()], run.report


@needs_compiler
def test_a_second_process_lowers_the_step_once():
    attempts, gradients, report = _first_step(0.6)
    again, same, found = _first_step(0.6)
    assert len(again) == 1 <= len(attempts)
    assert again[0].route == attempts[-1].route or again[0].route in [one.route for one in attempts if one]
    assert (found.peak_bytes, found.budget_bytes) == (report.peak_bytes, report.budget_bytes)
    torch.testing.assert_close(same, gradients, rtol=0, atol=0)


@needs_compiler
def test_what_does_not_keep_the_budget_now_is_left(monkeypatch, tmp_path):
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(KnownRoutes, "get", lambda self, key: Route(True, (), 1 << 40))
    _, gradients, report = _first_step(0.6)
    assert report.peak_bytes <= report.budget_bytes
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(KnownRoutes, "get", lambda self, key: Route(False, ("no such rewrite",)))
    _, same, report = _first_step(0.6)
    assert report.peak_bytes <= report.budget_bytes
    torch.testing.assert_close(same, gradients)
