from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn

import memopt

jax = pytest.importorskip("jax")
if importlib.util.find_spec("torchax") is None:
    pytest.skip("needs torchax", allow_module_level=True)

from tests.backends.results import check_results  # noqa: E402
from tests.end_to_end import build, gradients, restorer, step  # noqa: E402


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(*layers)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def has_cuda() -> bool:
    if not torch.cuda.is_available():
        return False
    import memopt.xla.executable  # noqa: F401  # it says how much memory XLA may take

    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


@torch.no_grad()
def test_equal_to_eager_for_new_shapes_and_new_weights() -> None:
    model = network().eval()
    compiled = memopt.compile(model, backend="xla")
    x = torch.randn(4, 3, 8, 8)
    close(compiled(x), model(x))
    close(compiled(x[:2]), model(x[:2]))
    model[4].weight.mul_(2.0)
    model[1].running_mean.add_(1.0)
    close(compiled(x), model(x))
    assert str(compiled.report).startswith("Sequential, backend xla")


def test_training_moves_the_statistics_and_gives_the_gradients() -> None:
    model = network()
    x = torch.randn(4, 3, 8, 8)
    restore = restorer(model)
    model(x).square().mean().backward()
    expected, buffers = gradients(model), [buffer.clone() for buffer in model.buffers()]
    restore()
    memopt.compile(model, backend="xla", verify=False)(x).square().mean().backward()
    for found, value in zip(gradients(model), expected, strict=True):
        close(found, value)
    for found, value in zip(model.buffers(), buffers, strict=True):
        close(found, value)


@torch.no_grad()
def test_what_stays_is_imported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from memopt.xla import exchange

    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).eval()
    compiled = memopt.compile(model, backend="xla", verify=False)
    x = torch.randn(5, 8)
    close(compiled(x), model(x))
    imported: list[int] = []
    real = exchange.to_jax
    monkeypatch.setattr(exchange, "to_jax", lambda value: (imported.append(value.numel()), real(value))[1])
    close(compiled(x), model(x))
    assert imported == [x.numel()]
    model[2].weight.mul_(2.0)  # in place: an array that shares the memory shows it
    model[2].bias.data = torch.randn(4)  # elsewhere: imported again
    imported.clear()
    close(compiled(x), model(x))
    assert sorted(imported) == [4, x.numel()]


@pytest.mark.gpu
@pytest.mark.skipif(not has_cuda(), reason="needs a CUDA device and JAX with CUDA")
@torch.no_grad()
def test_xla_waits_for_what_pytorch_has_queued() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1 << 20))

        def forward(self, *given: torch.Tensor) -> torch.Tensor:
            return self.weight * 2 + sum(given)

    for given in ((), (torch.zeros(1 << 20, device="cuda"),)):
        model = Alone().cuda().eval()
        compiled = memopt.compile(model, backend="xla", verify=False)
        compiled(*given)
        for value in range(2, 6):
            torch.cuda._sleep(50_000_000)  # what is queued next lies some 25 ms ahead
            model.weight.fill_(value)
            assert torch.equal(compiled(*given), torch.full((1 << 20,), 2.0 * value, device="cuda"))


@pytest.mark.gpu
@pytest.mark.skipif(not has_cuda(), reason="needs a CUDA device and JAX with CUDA")
def test_cuda() -> None:
    model = network().cuda()
    x = torch.randn(4, 3, 8, 8, device="cuda")
    compiled = memopt.compile(model, backend="xla", verify=False)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-2, atol=1e-2)
    model.train()
    restore = restorer(model)
    model(x).square().mean().backward()
    expected = gradients(model)
    restore()
    compiled(x).square().mean().backward()
    for found, value in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not has_cuda(), reason="needs a CUDA device and JAX with CUDA")
@pytest.mark.parametrize("name", ["gpt2", "llama_tiny", "unet", "hf_bert"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_on_cuda(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # either engine's TF32 is coarser than the tolerance
    model, inputs = build(name)
    model = model.cuda().to(dtype).eval()
    inputs = {k: v.cuda().to(dtype) if v.is_floating_point() else v.cuda() for k, v in inputs.items()}
    restore = restorer(model)
    loss = step(model, inputs)
    expected = gradients(model)
    restore()
    tolerance = 2e-3 if dtype is torch.float32 else 6e-2
    compiled = memopt.compile(model, backend="xla", verify=False)
    torch.testing.assert_close(step(compiled, inputs), loss, rtol=tolerance, atol=tolerance)
    largest = max(float(value.abs().max()) for value in expected if value is not None)
    for found, value in zip(gradients(model), expected, strict=True):
        if value is not None:  # some are zero but for rounding: those of biases that a softmax cancels
            scale = max(float(value.abs().max()), 1e-4 * largest)
            assert float((found - value).abs().max()) <= tolerance * scale


@pytest.mark.gpu
@pytest.mark.skipif(not has_cuda(), reason="needs a CUDA device and JAX with CUDA")
def test_pointers_are_exchanged_without_a_copy() -> None:
    from memopt.xla.exchange import Exporter, to_jax

    value = torch.randn(1 << 20, device="cuda")
    array = to_jax(value)
    assert array.unsafe_buffer_pointer() == value.data_ptr()
    assert Exporter(value.device)(array).data_ptr() == value.data_ptr()


@pytest.mark.parametrize("package", ["jax", "torchax"])
def test_a_missing_package_is_one_line(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else real(name))
    with pytest.raises(ValueError, match=rf"^backend 'xla' needs {package}: pip install memopt\[xla\]$"):
        memopt.compile(network(), backend="xla")


@pytest.mark.skipif(has_cuda(), reason="JAX has CUDA here")
def test_jax_without_cuda_is_one_line() -> None:
    from memopt.backends.xla import XlaBackend

    with pytest.raises(ValueError, match=r"^backend 'xla' on CUDA needs JAX with CUDA: pip install 'jax\[cuda13\]'$"):
        XlaBackend(torch.device("cuda"))


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="runs on cpu and cuda, not on meta"):
        memopt.compile(network().to("meta"), backend="xla")


def test_results_of_many_kinds() -> None:
    check_results("xla")


class Unknown(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.airy_ai(x)


@torch.no_grad()
def test_an_operator_without_a_form_is_named_with_its_line() -> None:
    with pytest.raises(RuntimeError, match=r"^aten\.special_airy_ai\.default \(.*test_xla\.py:\d+, .*\) has no form"):
        memopt.compile(Unknown().eval(), backend="xla")(torch.randn(3))


class Wrong(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float8_e4m3fn).to(torch.float32)


@torch.no_grad()
def test_a_dtype_without_a_form_is_named_with_its_line() -> None:
    with pytest.raises(RuntimeError, match=r"float8_e4m3fn has no form under XLA") as found:
        memopt.compile(Wrong().eval(), backend="xla", passes=())(torch.randn(3))
    assert "\n" not in str(found.value) and "test_xla.py:" in str(found.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_types(dtype: torch.dtype) -> None:
    model = network().eval().to(dtype)
    x = torch.randn(4, 3, 8, 8).to(dtype)
    found = memopt.compile(model, backend="xla", passes=())(x)
    assert found.dtype is dtype
    torch.testing.assert_close(found, model(x), rtol=0.02, atol=0.02)


@torch.no_grad()
def test_empty_and_misaligned_inputs() -> None:
    compiled = memopt.compile(nn.ReLU().eval(), backend="xla")
    assert compiled(torch.zeros(0, 3)).shape == (0, 3)
    x = torch.randn(65)[1:]
    assert torch.equal(compiled(x), x.relu())
    x.neg_()
    assert torch.equal(compiled(x), x.relu())
    single = torch.randn(2, 1, 4, 4).to(memory_format=torch.channels_last)  # contiguous, yet with other strides
    assert single.stride() != torch.empty(2, 1, 4, 4).stride() and torch.equal(compiled(single), single.relu())


@torch.no_grad()
def test_the_report_says_what_the_compiler_says() -> None:
    model = network().eval()
    compiled = memopt.compile(model, "1GB", backend="xla")
    compiled(torch.randn(4, 3, 8, 8))
    report = compiled.report
    (one,) = report.executables
    weights = sum(value.numel() * 4 for value in (model[4].weight, model[4].bias, model[0].weight, model[0].bias))
    assert one.arguments == weights + 4 * 3 * 64 * 4 and one.outputs == 160 and one.temporaries > 0
    assert "what the engine's executables take:" in str(report)
    assert (
        report.peak_bytes <= 1e9
        and memopt.report.json_format.from_json(memopt.report.json_format.to_json(report)).executables
        == report.executables
    )


@pytest.mark.long
@torch.no_grad()
def test_inference_over_the_budget_is_refused() -> None:
    compiled = memopt.compile(network().eval(), 30_000, backend="xla")
    with pytest.raises(memopt.BudgetError) as found:
        compiled(torch.randn(16, 3, 8, 8))
    assert found.value.minimum_bytes > 30_000
