from __future__ import annotations

import contextlib
import gc
import importlib.util
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memopt

jax = pytest.importorskip("jax")
if importlib.util.find_spec("torchax") is None:
    pytest.skip("needs torchax", allow_module_level=True)

from tests.end_to_end import build, gradients, restorer, step  # noqa: E402


def deep(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Dropout(dropout)) for _ in range(6)]
    return nn.Sequential(*blocks)


def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    loss.backward()
    return loss.detach()


def test_the_gradients_are_equal_and_the_memory_falls_with_the_budget() -> None:
    model, x = deep(), torch.randn(512, 64)
    restore = restorer(model)
    loss_of(model, x)
    expected = gradients(model)
    peaks: list[int] = []
    for share in (None, 0.6, 0.4):
        restore()
        budget = None if share is None else int(peaks[0] * share)
        compiled = memopt.compile(model, budget, backend="xla", verify=False)
        loss_of(compiled, x)
        for found, value in zip(gradients(model), expected, strict=True):
            torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-7)
        peaks.append(compiled.report.peak_bytes)
        assert budget is None or peaks[-1] <= budget
    assert peaks[0] > peaks[1] >= peaks[2]


@pytest.mark.long
def test_what_no_plan_keeps_is_refused() -> None:
    compiled = memopt.compile(deep(), 400_000, backend="xla", verify=False)
    with pytest.raises(memopt.BudgetError) as found:
        loss_of(compiled, torch.randn(512, 64))
    assert found.value.minimum_bytes > 400_000


def test_dropout_is_reproducible_and_keeps_its_mask_in_backward() -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(40_000))

        def forward(self) -> torch.Tensor:
            return F.dropout(self.weight, 0.25, True)

    model = Dropped()
    compiled = memopt.compile(model, backend="xla", verify=False)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        model.zero_grad()
        result = compiled()
        result.sum().backward()
        assert model.weight.grad is not None
        torch.testing.assert_close(model.weight.grad, result.detach())  # 0 or 1/(1-p) where forward had it
        runs.append(result.detach())
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
    assert abs(float((runs[0] != 0).float().mean()) - 0.75) < 0.01
    again = compiled().detach()
    assert not torch.equal(again, compiled().detach())


def test_an_optimizer_step_is_seen() -> None:
    model, x = deep(), torch.randn(16, 64)
    twin = deep()
    compiled = memopt.compile(model, backend="xla", verify=False)
    for net, run in ((model, compiled), (twin, twin)):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(run, x)
            optimizer.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.quick("layout0-False", "layout1-True")
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_nothing_is_copied_between_pytorch_and_xla(
    layout: torch.memory_format, hooked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memopt.xla import exchange

    torch.manual_seed(0)
    blocks = [nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3)]
    model = nn.Sequential(*blocks).to(memory_format=layout)
    x = torch.randn(4, 4, 16, 16).contiguous(memory_format=layout)
    restore = restorer(model)
    loss_of(model, x)
    expected = gradients(model)
    restore()
    compiled = memopt.compile(model, backend="xla", verify=False)
    loss_of(compiled, x)
    shared: list[bool] = []
    real = exchange.to_jax

    def to_jax(value: torch.Tensor) -> Any:
        array = real(value)
        shared.append(array.unsafe_buffer_pointer() == value.data_ptr())
        return array

    monkeypatch.setattr(exchange, "to_jax", to_jax)
    restore()
    saved: list[torch.Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda value: saved.append(value) or value, lambda value: value)
    with hooks if hooked else contextlib.nullcontext():
        result = compiled(x)
        assert result.is_contiguous(memory_format=layout)
        result.square().mean().backward()
    assert_near(model, expected)
    # The input goes to both graphs, and the gradient of the result; what forward saves only where hooks look at it.
    assert all(shared) and (len(shared) > 5 if hooked else len(shared) == 3)
    assert not hooked or min(value.numel() for value in saved) > 0


def test_what_is_saved_lives_as_long_as_the_graph_of_autograd() -> None:
    model, x = deep(0.1), torch.randn(32, 64)
    compiled = memopt.compile(model, backend="xla", verify=False)
    loss_of(compiled, x)
    before = len(jax.live_arrays())
    loss = compiled(x).square().mean()
    saved = len(jax.live_arrays()) - before
    assert saved > 12  # two of each block and more
    runs = []
    for _ in range(2):
        model.zero_grad()
        gc.collect()
        loss.backward(retain_graph=True)
        runs.append(gradients(model))
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)  # type: ignore[arg-type]
    before = len(jax.live_arrays())
    del loss
    assert before - len(jax.live_arrays()) > 12


def test_small_gradients_and_statistics_are_exchanged_together(monkeypatch: pytest.MonkeyPatch) -> None:
    from memopt.xla import exchange

    torch.manual_seed(0)
    blocks = [
        part
        for _ in range(4)
        for part in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, (1, 3)))
    ]
    model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(512, 300)).to(memory_format=torch.channels_last)
    x = torch.randn(4, 4, 16, 16)
    restore = restorer(model)
    loss_of(model, x)
    expected = gradients(model)
    buffers = [buffer.clone() for buffer in model.buffers()]
    restore()
    compiled = memopt.compile(model, backend="xla", verify=False)
    exported: list[int] = []
    real = exchange.Exporter.__call__

    def export(self: Any, array: Any, *like: Any) -> torch.Tensor:
        exported.append(array.size)
        return real(self, array, *like)

    monkeypatch.setattr(exchange.Exporter, "__call__", export)
    loss_of(compiled, x)
    assert_near(model, expected)
    for found, value in zip(model.buffers(), buffers, strict=True):
        torch.testing.assert_close(found, value)
    # Statistics and counters of batches, the result, small gradients, and the one large gradient.
    assert len(exported) == 5 and 512 * 300 in exported
    for parameter in model.parameters():
        assert parameter.grad is not None and parameter.grad.stride() == parameter.stride()
        assert parameter.grad.data_ptr() % 64 == 0 and not parameter.grad._is_view()
    # Each is written by itself: an optimizer's change of one shows in no other.
    kept = gradients(model)
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    version = grads[1]._version
    grads[0].zero_()
    assert not grads[0].any() and grads[1]._version == version
    for found, value in zip(grads[1:], kept[1:], strict=True):
        assert torch.equal(found, value)  # type: ignore[arg-type]


def test_what_is_saved_may_be_kept_elsewhere_meanwhile() -> None:
    model, x = deep(), torch.randn(32, 64)
    loss_of(model, x)
    expected = gradients(model)
    model.zero_grad()
    compiled = memopt.compile(model, backend="xla", verify=False)
    with torch.autograd.graph.saved_tensors_hooks(lambda value: value.numpy().copy(), torch.from_numpy):
        loss_of(compiled, x)
    assert_near(model, expected)


def trained(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model in training mode without dropout, and sixteen examples."""
    model, inputs = build(name)
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for attribute in ("dropout", "attention_dropout", "dropout_rate"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)
    return model, {key: torch.cat([value] * 4) for key, value in inputs.items()}


def assert_near(model: nn.Module, expected: list[torch.Tensor | None], tolerance: float = 1e-4) -> None:
    for found, value in zip(gradients(model), expected, strict=True):
        if value is not None:
            assert found is not None
            assert float((found - value).abs().max()) <= tolerance * float(value.abs().max()) + 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "least"),
    [("gpt2", 0.4), ("llama_tiny", 0.4), ("unet", 0.4), ("resnet18", 0.6), ("hf_t5", 0.8), ("hf_bert", 0.8)],
)
def test_models(name: str, least: float) -> None:
    model, inputs = trained(name)
    restore = restorer(model)
    loss = step(model, inputs)
    expected = gradients(model)
    peak = 0
    for share in (None, 1.0, 0.6, 0.4):
        if share is not None and share < least and share != 1.0:
            continue
        restore()
        torch._dynamo.reset()
        budget = None if share is None else int(peak * share)
        compiled = memopt.compile(model, budget, backend="xla", verify=False)
        torch.testing.assert_close(step(compiled, inputs), loss, rtol=1e-4, atol=1e-5)
        peak = peak or compiled.report.peak_bytes
        assert budget is None or compiled.report.peak_bytes <= budget
        assert_near(model, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "unet"])
def test_the_minimum_that_a_refusal_names_is_feasible(name: str) -> None:
    model, inputs = trained(name)
    restore = restorer(model)
    step(model, inputs)
    expected = gradients(model)
    restore()
    with pytest.raises(memopt.BudgetError) as refused:
        step(memopt.compile(model, 2_000_000, backend="xla", verify=False), inputs)
    torch._dynamo.reset()
    restore()
    budget = int(refused.value.minimum_bytes * 1.02)
    compiled = memopt.compile(model, budget, backend="xla", verify=False)
    step(compiled, inputs)
    assert compiled.report.peak_bytes <= budget
    assert_near(model, expected)
