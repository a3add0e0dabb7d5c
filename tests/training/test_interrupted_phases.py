"""A first step that is interrupted in any of its phases: all is as it was, and the next call plans and runs."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn

import memopt
from memopt.common import phases
from tests.inductor.test_peak_lower_bound import needs_compiler
from tests.training.steps import budget_for


class Interrupting(phases.Watch):
    """Interrupts where a phase begins or ends for the first time that was not interrupted before."""

    def __init__(self, ends: bool) -> None:
        self._ends, self.seen = ends, list[str]()

    @contextlib.contextmanager
    def around(self, name):
        new = name not in self.seen
        if new:
            self.seen.append(name)
        if new and not self._ends:
            raise KeyboardInterrupt
        yield
        if new and self._ends:
            raise KeyboardInterrupt


class Net(nn.Module):
    """Buffers that forward writes, random numbers, and a plain attribute that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 16)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = x + self.last(nn.functional.dropout(self.norm(self.first(x)).tanh().exp(), 0.5, self.training))
        return x.square().mean()


def state(model, optimizer):
    """All that a call that does not end must leave alone; tensors by value, version and place."""
    tensors = model.state_dict(keep_vars=True)
    modules = list(model.modules())
    return {
        "values": {key: value.detach().clone() for key, value in tensors.items()},
        "places": {key: (value._version, value.data_ptr()) for key, value in tensors.items()},
        "gradients": [parameter.grad for parameter in model.parameters()],
        "modes": [module.training for module in modules],
        "classes": [type(module) for module in modules],
        "hooks": [{k: len(v) for k, v in vars(module).items() if "hooks" in k and v} for module in modules],
        "of tensors": [len(parameter._backward_hooks or ()) for parameter in model.parameters()],
        "calls": model.calls,
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "random": torch.get_rng_state(),
        "around": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")),
        "dispatch": [type(mode) for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack()],
    }


def alike(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    return len(a) == len(b) and all(map(alike, a, b)) if isinstance(a, list) else a == b


@pytest.mark.quick("aten-False")
@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("backend", ["aten", pytest.param("inductor", marks=needs_compiler)])
def test_each_phase_of_a_first_step_may_be_interrupted(monkeypatch, own_caches, backend, ends):
    monkeypatch.setenv("MEMOPT_CACHE", "0")  # each attempt does all that there is to do
    torch.manual_seed(0)
    model, x = Net().train(), torch.randn(64, 16)
    twin = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters())
    budget = budget_for(model, (x,), 0.4, optimizer=optimizer)
    run, watch = memopt.compile(model, budget, optimizer=optimizer, backend=backend), Interrupting(ends)
    before = state(model, optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(phases, "watch", watch)
        while True:
            try:
                outputs = run(x)
            except KeyboardInterrupt:
                after = state(model, optimizer)
                changed = [key for key in before if not alike(before[key], after[key])]
                assert not changed, f"{watch.seen[-1]}: {changed}"
                with torch.random.fork_rng(devices=[]):
                    copy.deepcopy(model)(x).backward()
            else:
                break
    assert {"tracing", "rewriting", "searching" if backend == "aten" else "generating code"} <= set(watch.seen)
    outputs.backward()
    if backend == "aten":
        torch.set_rng_state(before["random"])
        twin(x).backward()
        for (name, a), (_, b) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, msg=name)
    optimizer.step()
    assert run.report.peak_bytes <= budget
