"""The entry point of torch.compile: options, what is counted as resident, graph breaks and shapes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import memopt
from memopt import entry
from memopt.entry import torch_compile_backend

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


X = torch.linspace(-1, 1, 6 * 8).reshape(6, 8)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 4))


def compiled(module: nn.Module, **options: object) -> nn.Module:
    return torch.compile(module, backend=torch_compile_backend, options={"backend": "aten", **options})


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[entry.Session]:
    """The sessions that the entry point makes."""
    made: list[entry.Session] = []

    class Kept(entry.Session):
        def __init__(self, **options) -> None:
            super().__init__(**options)
            made.append(self)

    monkeypatch.setattr(entry, "Session", Kept)
    return made


def step(run: nn.Module, module: nn.Module, x: torch.Tensor = X) -> list[torch.Tensor]:
    module.zero_grad()
    found = run(x)
    found.square().sum().backward()
    return [found.detach(), *(parameter.grad.clone() for parameter in module.parameters())]


def test_a_step_equals_eager_s_and_what_is_resident_is_counted(sessions) -> None:
    module = model()
    optimizer = torch.optim.AdamW(module.parameters())
    run = compiled(module, budget="1MB", optimizer=optimizer)
    reference = model()
    torch.testing.assert_close(step(run, module), step(reference, reference), rtol=0, atol=0)
    torch.testing.assert_close(list(module.buffers()), list(reference.buffers()), rtol=0, atol=0)
    (session,) = sessions
    parameters = sum(p.nbytes for p in module.parameters())
    resident = session.resident
    assert (resident.parameters, resident.trainable, resident.inputs) == (parameters, parameters, X.nbytes)
    assert resident.buffers == sum(b.nbytes for b in module.buffers())
    assert resident.optimizer_state == 2 * parameters + 4 * len(list(module.parameters()))
    assert session.report.budget_bytes == 1_000_000 and not optimizer.state


def test_inference() -> None:
    module = model().eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(module)(X), module(X))


def test_a_budget_that_cannot_be_kept_says_so() -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        compiled(model(), budget=1000)(X)
    assert isinstance(caught.value.inner_exception, memopt.BudgetError)
    assert caught.value.inner_exception.budget_bytes == 1000


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        torch._dynamo.graph_break()
        return self.second(y)


def test_graph_breaks_are_refused_with_a_budget_and_run_without() -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="cannot be shared among several graphs"):
        compiled(Broken(), budget="1MB")(X)
    torch._dynamo.reset()
    module = Broken()
    torch.testing.assert_close(step(compiled(module), module), step(module, module), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speed": 1}, r"unknown option 'speed' \(known: budget, backend, passes"),
        ({"budget": "20"}, "20 what"),
        ({"allow": ("bf16",)}, "unknown lever 'bf16'"),
        ({"backend": "nowhere"}, "unknown backend 'nowhere'"),
    ],
)
def test_options_that_are_not_understood(options, message) -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=message):
        compiled(model(), **options)(X)
    torch._dynamo.reset()
    if "speed" in options:
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=message):
            torch.compile(model(), backend=lambda *a: torch_compile_backend(*a, **options))(X)


def test_dynamic_shapes_are_planned_for_each_shape(sessions) -> None:
    module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    run = torch.compile(module, backend=torch_compile_backend, dynamic=True, options={"backend": "aten"})
    for rows in (6, 12, 6, 12, 30):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(step(run, module, x), step(module, module, x), rtol=0, atol=0)
    assert len(sessions) == 3
    assert sorted(session.resident.inputs for session in sessions) == [rows * 32 for rows in (6, 12, 30)]
    with torch.no_grad():
        torch.testing.assert_close(run(X), module(X))


ENTRY_POINT = """
import sys
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 4))
x = torch.randn(6, 8)
found = []
assert "memopt" not in sys.modules
compiled = torch.compile(model, backend="memopt", options={"budget": "1MB", "backend": "aten"})
for run in (model, compiled):
    model.zero_grad()
    torch.manual_seed(1)
    run(x).sum().backward()
    found.append([p.grad.clone() for p in model.parameters()])
assert "memopt" in sys.modules
assert all(torch.equal(a, b) for a, b in zip(*found))
torch._dynamo.reset()
for options, words in (({"budget": 1000}, "no plan fits"), ({"budget": "20"}, "20 what"), ({"speed": 1}, "speed")):
    try:
        torch.compile(model, backend="memopt", options={"backend": "aten", **options})(x)
    except Exception as error:
        assert words in str(error), error
    else:
        raise AssertionError(options)
print("entry point works")
"""


def test_torch_compile_finds_the_backend_without_an_import() -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("TORCH_LOGS", "PYTEST"))}
    done = subprocess.run([sys.executable, "-c", ENTRY_POINT], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "entry point works" in done.stdout
