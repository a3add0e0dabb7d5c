"""Memory that runs out while a step is planned: nothing of the model has changed, and training goes on."""

from __future__ import annotations

import pytest
import torch

import memopt
from memopt.memory.measure import Measurement
from memopt.step import trial as trial_module
from tests.training.steps import assert_equal, budget_for, gradients, make, peak_of, step


@pytest.fixture
def starve(monkeypatch):
    """Have the first so many trial steps run out of memory."""
    real, failed = trial_module.measure, []

    def choose(times):
        def measure(fn, *args, **kwargs):
            if len(failed) < times:
                failed.append(1)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has a total of")
            return real(fn, *args, **kwargs)

        monkeypatch.setattr(trial_module, "measure", measure)
        return failed

    return choose


@pytest.mark.quick("1")
@pytest.mark.parametrize("times", [1, 1000])
def test_a_trial_that_runs_out_leaves_the_state_alone_and_training_goes_on(starve, times):
    model, x = make(dropout=0.2)
    expected = step(model, x), gradients(model)
    model.zero_grad()
    budget = budget_for(model, (x,), 0.4)
    start = {key: (value.clone(), value._version) for key, value in model.state_dict(keep_vars=True).items()}
    failed = starve(times)
    run = memopt.compile(model, budget, backend="aten")
    random = torch.get_rng_state()
    run._memopt.plan((x,), {})
    assert failed
    assert torch.equal(torch.get_rng_state(), random)
    for key, value in model.state_dict(keep_vars=True).items():
        assert torch.equal(value, start[key][0]) and value._version == start[key][1] and value.grad is None
    assert_equal((step(run, x), gradients(model)), expected)
    model.zero_grad()
    assert peak_of(lambda: step(run, x), model, x) <= budget


def test_a_trial_that_always_runs_out_is_on_record_in_one_line(starve):
    model, x = make()
    budget = budget_for(model, (x,), 0.4)
    starve(1000)
    run = memopt.compile(model, budget, example_inputs=(x,), backend="aten")
    (note,) = [note for note in run.report.notes if "out of memory" in note]
    assert "\n" not in note and run.report.measured_peak_bytes is None


def test_a_trial_that_runs_out_is_answered_with_a_tighter_plan(starve):
    model, x = make()
    budget = budget_for(model, (x,), 0.6)
    plain = memopt.compile(model, budget, example_inputs=(x,), backend="aten").report
    starve(1)
    tighter = memopt.compile(model, budget, example_inputs=(x,), backend="aten").report
    assert tighter.peak_bytes < plain.peak_bytes
    assert tighter.measured_peak_bytes is not None


def test_measuring_and_proving_that_run_out_do_not_stop_the_plan(monkeypatch):
    model, x = make()
    expected = step(model, x), gradients(model)
    model.zero_grad()
    budget = budget_for(model, (x,), 0.4)
    failed = set()

    def full(where):
        def fail(*_, **__):
            failed.add(where)
            raise torch.OutOfMemoryError("CUDA out of memory.")

        return fail

    monkeypatch.setenv("MEMOPT_CACHE", "0")
    monkeypatch.setattr("memopt.evidence.synthesize", full("evidence"))
    monkeypatch.setattr("memopt.memory.cost.measure._filled", full("costs"))
    run = memopt.compile(model, budget, backend="aten")
    assert_equal((step(run, x), gradients(model)), expected)
    assert "costs" in failed
    assert run.report.peak_bytes <= budget
    model.zero_grad()
    assert peak_of(lambda: step(run, x), model, x) <= budget


def test_planning_itself_stays_inside_the_budget(monkeypatch):
    """Trials and proofs run on the device too: the first call must not hold more than later ones may."""
    model, x = make(layers=6)
    budget = budget_for(model, (x,), 0.3)
    memopt.compile(model, budget, backend="aten")(x)  # operators are measured once, and kept on disk
    torch._dynamo.reset()
    run = memopt.compile(model, budget, backend="aten")
    # One profiler at a time: the trial runs, but does not measure.
    monkeypatch.setattr(trial_module, "measure", lambda fn, *args, device: Measurement(fn(*args), 0, 0, 0.0))
    # Random states are set aside while Dynamo compiles (two) and while the trial runs: in the machine's own memory.
    aside = 3 * torch.get_rng_state().nbytes
    assert peak_of(lambda: run(x), model, x) <= budget + aside


def test_a_trial_runs_on_the_caller_s_own_tensors_and_leaves_them_alone(monkeypatch):
    model, x = make(layers=2)
    seen = []
    real = trial_module.measure
    monkeypatch.setattr(trial_module, "measure", lambda fn, args, **o: seen.append(list(args)) or real(fn, args, **o))
    start, version = x.clone(), x._version
    memopt.compile(model, budget_for(model, (x,), 0.5), backend="aten")(x)
    assert any(value.data_ptr() == x.data_ptr() for value in seen[-1])
    assert torch.equal(x, start) and x._version == version
