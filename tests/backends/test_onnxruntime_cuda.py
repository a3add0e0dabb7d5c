"""ONNX Runtime on a CUDA device: the same numbers, no copies to the host, and a budget that is kept."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import memopt
from memopt.onnxruntime.session import Session, Settings
from tests.backends.test_onnxruntime import close, network
from tests.onnxruntime.test_session import exported, linear

onnxruntime = pytest.importorskip("onnxruntime")

HERE = torch.cuda.is_available() and "CUDAExecutionProvider" in onnxruntime.get_available_providers()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HERE, reason="needs a CUDA device and onnxruntime-gpu")]


def transfers(call: object) -> list[str]:
    """What was copied between host and device while the call ran."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as found:
        call()
        torch.cuda.synchronize()
    names = [event.name for event in found.events()]
    assert any("kernel" in name.lower() or "gemm" in name.lower() or "conv" in name.lower() for name in names), names
    return [name for name in names if "Memcpy" in name and ("HtoD" in name or "DtoH" in name)]


@pytest.mark.parametrize("budget", [None, "2GB"])
@torch.no_grad()
def test_equal_to_eager(budget: str | None) -> None:
    model = network().cuda()
    compiled = memopt.compile(model, budget, backend="onnxruntime")
    for batch in (4, 2, 4):
        x = torch.randn(batch, 3, 8, 8, device="cuda")
        close(compiled(x), model(x))


@pytest.mark.parametrize("budget", [None, "2GB"])
@torch.no_grad()
def test_nothing_is_copied_to_or_from_the_host(budget: str | None) -> None:
    model, x = network().cuda(), torch.randn(4, 3, 8, 8, device="cuda")
    compiled = memopt.compile(model, budget, backend="onnxruntime")
    for _ in range(3):
        compiled(x)
    assert transfers(lambda: compiled(x)) == []


@pytest.mark.parametrize("tight", [False, True])
@torch.no_grad()
def test_results_are_new_and_in_order_with_the_current_stream(tight: bool) -> None:
    model = linear().cuda()
    x = torch.randn(3, 64, device="cuda")
    session = Session(exported(model, x), [torch.empty(3, 2000, device="cuda")], Settings(x.device, tight))
    given = [torch.randn(3, 64, device="cuda") for _ in range(50)]
    found = [session.run([2 * value - value])[0] for value in given]
    for value, result in zip(given, found, strict=True):
        torch.testing.assert_close(result, model(value), rtol=1e-4, atol=1e-4)
    assert session.graph is not tight


class Weightless(nn.Module):
    """Without weights, so that only its inputs tell the device."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input.softmax(0).topk(3).values


@torch.no_grad()
def test_a_model_without_weights() -> None:
    model, x = Weightless(), torch.randn(5, 9, device="cuda")
    close(memopt.compile(model, backend="onnxruntime")(x), model(x))


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.into(x).chunk(3, -1))
        found = nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        return self.out(found.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("dtype", "units"), [(torch.float32, 64), (torch.float16, 16)])
@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_attention_by_any_kernel(dtype: torch.dtype, units: int, masked: bool) -> None:
    torch.manual_seed(0)
    model = Attending().cuda().to(dtype).eval()
    x = torch.randn(2, 32, 64, device="cuda", dtype=dtype)
    mask = torch.randn(2, 1, 32, 32, device="cuda", dtype=dtype) if masked else None
    found = memopt.compile(model, backend="onnxruntime")(x, mask)
    wide = model.double()(x.double(), None if mask is None else mask.double())
    assert (found.double() - wide).abs().max() <= units * torch.finfo(dtype).eps * wide.abs().max()


@torch.no_grad()
def test_a_budget_is_kept_and_the_least_is_named() -> None:
    gc.collect()
    others = torch.cuda.memory_allocated()
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 8, 3, padding=1)).cuda().eval()
    x = torch.randn(16, 3, 256, 256, device="cuda")
    roomy = memopt.compile(model, "8GB", backend="onnxruntime")
    roomy(x)
    least, measured = roomy.report.minimum_bytes, roomy.report.measured_peak_bytes
    assert 2**28 < measured < least
    with pytest.raises(memopt.BudgetError) as found:
        memopt.compile(model, "90MB", backend="onnxruntime")(x)
    least_in_chunks = found.value.minimum_bytes
    assert least_in_chunks < least  # of the batch
    del roomy
    for share in (1, 1.02, 1.3):  # plans for more room may take more than they should: then less is planned for
        budget = int(share * least_in_chunks)
        enough = memopt.compile(model, budget, backend="onnxruntime")
        for _ in range(3):
            torch.testing.assert_close(enough(x), model(x), rtol=1e-3, atol=2e-3)  # eager's convolutions use TF32
            torch.cuda.empty_cache()  # what ONNX Runtime gave back is unmapped, and mapped again within the limit
        torch.cuda.reset_peak_memory_stats()
        enough(x)
        assert torch.cuda.max_memory_allocated() - others <= budget


@torch.no_grad()
def test_with_a_budget_all_its_memory_is_pytorch_s() -> None:
    model, x = linear().cuda(), torch.randn(4096, 64, device="cuda")
    session = Session(exported(model, x), [torch.empty(4096, 2000, device="cuda")], Settings(x.device, tight=True))
    session.run([x])
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = [session.run([x]) for _ in range(3)]
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before > 4 * 2000 * 4096 * 3
    assert free - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved() < 2**22 and len(kept) == 3
