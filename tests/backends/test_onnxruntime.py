from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt.backends.onnxruntime import OnnxRuntimeBackend
from memopt.memory.timeline import Timeline
from memopt.program import Program
from memopt.step.inference_plan import plan_within
from memopt.step.planned import Planned
from tests.backends.results import check_results

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(*layers).eval()


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.quick("1GB")
@pytest.mark.parametrize("budget", [None, "1GB"])
@torch.no_grad()
def test_equal_to_eager_for_new_shapes_and_new_weights(budget: str | None) -> None:
    model = network()
    compiled = memopt.compile(model, budget, backend="onnxruntime")
    x = torch.randn(4, 3, 8, 8)
    close(compiled(x), model(x))
    close(compiled(x[:2]), model(x[:2]))
    close(compiled(x[:0]), model(x[:0]))
    model[4].weight.mul_(2.0)
    model[1].running_mean.add_(1.0)
    close(compiled(x), model(x))
    assert str(compiled.report).startswith("Sequential, backend onnxruntime")


def test_results_of_many_kinds() -> None:
    check_results("onnxruntime")


@pytest.mark.long
@torch.no_grad()
def test_attention_of_a_hugging_face_model() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64
    )
    model = transformers.BertModel(config).eval()
    ids, mask = torch.randint(0, 99, (2, 7)), torch.ones(2, 7, dtype=torch.long)
    mask[1, 4:] = 0
    found = memopt.compile(model, backend="onnxruntime")(input_ids=ids, attention_mask=mask)
    close(found.last_hidden_state, model(input_ids=ids, attention_mask=mask).last_hidden_state)


@torch.no_grad()
def test_example_inputs_plan_without_a_session() -> None:
    compiled = memopt.compile(network(), backend="onnxruntime", example_inputs=(torch.randn(2, 3, 8, 8),))
    assert compiled.report.backend == "onnxruntime"


def test_gradients_are_refused() -> None:
    compiled = memopt.compile(network(), backend="onnxruntime")
    with pytest.raises(RuntimeError, match=r"computes no gradients: call the model under torch.no_grad\(\)$"):
        compiled(torch.randn(2, 3, 8, 8))


class Noisy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


@torch.no_grad()
def test_random_numbers_are_refused() -> None:
    with pytest.raises(RuntimeError, match="draws random numbers: ONNX Runtime would draw others"):
        memopt.compile(Noisy().eval(), backend="onnxruntime")(torch.randn(3))


class Sorted(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.svd(x).S


@torch.no_grad()
def test_what_cannot_be_exported_is_one_line() -> None:
    with pytest.raises(RuntimeError, match=r"torch\.onnx cannot export") as found:
        memopt.compile(Sorted().eval(), backend="onnxruntime")(torch.randn(3, 3))
    assert "\n" not in str(found.value)


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else real(name))
    with pytest.raises(ValueError, match=r"^backend 'onnxruntime' needs onnxruntime: pip install memopt\[onnx\]$"):
        memopt.compile(network(), backend="onnxruntime")


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="runs on cpu and cuda, not on meta"):
        memopt.compile(network().to("meta"), backend="onnxruntime")


class Wide(nn.Module):
    """Eight million floats between two small ends."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Buffer(torch.randn(64, 2**11))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x @ self.table).amax(0)


@pytest.mark.long
@torch.no_grad()
def test_the_least_budget_is_what_a_run_took() -> None:
    model, x = Wide().eval(), torch.randn(2**12, 64)
    roomy = memopt.compile(model, "1GB", backend="onnxruntime")
    close(roomy(x), model(x))
    measured = roomy.report.measured_peak_bytes
    wide = 2**23 * 4
    assert wide < measured < 3 * wide
    tight = memopt.compile(model, "20MB", backend="onnxruntime")
    for _ in range(2):  # a refused call is refused again
        with pytest.raises(memopt.BudgetError) as found:
            tight(x)
        assert wide < found.value.minimum_bytes < 3 * wide
    enough = memopt.compile(model, found.value.minimum_bytes + 4 * 2**20, backend="onnxruntime")
    close(enough(x), model(x))


@pytest.mark.long
@torch.no_grad()
def test_a_share_of_the_own_peak_is_a_budget_too() -> None:
    model, x = Wide().eval(), torch.randn(2**12, 64)
    with pytest.raises(memopt.BudgetError):
        memopt.compile(model, 0.1, backend="onnxruntime")(x)


@torch.no_grad()
def test_where_a_run_cannot_be_measured_the_prediction_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memopt.backends.onnxruntime.peak_of", lambda run, device: None)
    model, x = Wide().eval(), torch.randn(2**12, 64)
    with pytest.raises(memopt.BudgetError):
        memopt.compile(model, "20MB", backend="onnxruntime")(x)


@pytest.mark.long
@torch.no_grad()
def test_where_runs_take_more_than_their_plans_less_is_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans for less than a third of the budget take what they should, all others more than the budget."""
    rooms: list[int] = []

    def planned(session: Any, program: Program, before: Timeline, room: int, hope: int | None) -> tuple[Planned, str]:
        rooms.append(room)
        return plan_within(session, program, before, room, hope)

    monkeypatch.setattr("memopt.step.inference.plan_within", planned)
    budget = 2**26

    def peak_of(run: Callable[[], object], device: torch.device) -> int:
        return 2**25 if rooms[-1] < budget // 3 else budget

    monkeypatch.setattr("memopt.backends.onnxruntime.peak_of", peak_of)
    model, x = Wide().eval(), torch.randn(2**12, 64)
    compiled = memopt.compile(model, budget, backend="onnxruntime")
    for _ in range(2):
        close(compiled(x), model(x))
    assert len(rooms) > 1 and rooms == sorted(rooms, reverse=True)
    assert compiled.report.measured_peak_bytes <= budget
    with pytest.raises(memopt.BudgetError) as found:
        memopt.compile(model, 2**25, backend="onnxruntime")(x)
    least = memopt.compile(model, found.value.minimum_bytes, backend="onnxruntime")
    close(least(x), model(x))


@pytest.mark.long
@torch.no_grad()
def test_many_shapes() -> None:
    model = network()
    compiled = memopt.compile(model, backend="onnxruntime")
    for batch in range(1, 12):
        x = torch.randn(batch, 3, 8, 8)
        close(compiled(x), model(x))


def test_a_provider_that_is_not_installed_is_one_line() -> None:
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("onnxruntime-gpu is installed")
    with pytest.raises(ValueError, match=r"^backend 'onnxruntime' on CUDA needs onnxruntime-gpu: pip install"):
        OnnxRuntimeBackend(torch.device("cuda"))
