from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from memopt.convert.capture import capture
from memopt.convert.emit import emit
from memopt.onnxruntime.memory import TorchAllocator, peak_of
from memopt.onnxruntime.session import Session, Settings, cuda_options

CPU = torch.device("cpu")


def exported(model: nn.Module, *inputs: torch.Tensor) -> Any:
    named = {f"input{index}" if index else "input": value for index, value in enumerate(inputs)}
    return emit(capture(model, named, {}, required=False), ["y"])


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2000)).eval()


@pytest.mark.parametrize("tight", [False, True])
@torch.no_grad()
def test_results_are_new_and_right(tight: bool) -> None:
    model, x = linear(), torch.randn(3, 64)
    session = Session(exported(model, x), [torch.empty(3, 2000)], Settings(CPU, tight))
    (first,) = session.run([x])
    (second,) = session.run([2 * x])
    torch.testing.assert_close(first, model(x))
    torch.testing.assert_close(second, model(2 * x))


@torch.no_grad()
def test_inputs_of_any_layout() -> None:
    model, x = linear(), torch.randn(64, 3).t()
    session = Session(exported(model, x), [torch.empty(3, 2000)], Settings(CPU))
    torch.testing.assert_close(session.run([x])[0], model(x))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.big, self.small = nn.Buffer(torch.randn(64, 64)), nn.Buffer(torch.randn(64))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input @ self.big + self.small


@torch.no_grad()
def test_with_a_budget_constants_stay_the_tensors_that_they_are() -> None:
    model, x = Twice().eval(), torch.randn(3, 64)
    session = Session(exported(model, x), [torch.empty(3, 64)], Settings(CPU, tight=True))
    assert session.inputs == ["input"] and session.held_bytes == 64 * 4
    model.big.mul_(2.0)
    torch.testing.assert_close(session.run([x])[0], model(x))
    apart = Session(exported(model, x), [torch.empty(3, 64)], Settings(CPU))
    assert apart.held_bytes == 64 * 65 * 4


def test_what_it_refuses_is_one_line() -> None:
    model = exported(linear(), torch.randn(3, 64))
    model.graph.node(0).op_type = "NoSuchOperator"
    with pytest.raises(RuntimeError, match=r"^ONNX Runtime refuses the graph: .*NoSuchOperator") as found:
        Session(model, [torch.empty(3, 2000)], Settings(CPU))
    assert "\n" not in str(found.value)


@torch.no_grad()
def test_where_it_stops_is_one_line() -> None:
    x = torch.randn(3, 64)
    session = Session(exported(linear(), x), [torch.empty(3, 2000)], Settings(CPU))
    with pytest.raises(RuntimeError, match=r"^ONNX Runtime stops: ") as found:
        session.run([torch.randn(5, 63)])
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("tight", [False, True])
def test_options_are_strings_that_the_provider_knows(tight: bool) -> None:
    options = cuda_options(Settings(torch.device("cuda", 1), tight, 10**9), None if tight else 77, graph=not tight)
    assert options["device_id"] == "1" and options.get("user_compute_stream") == (None if tight else "77")
    assert options["gpu_mem_limit"] == "1000000000" and options["use_tf32"] == "0"
    assert options["enable_cuda_graph"] == str(int(not tight))
    assert ("cudnn_conv_use_max_workspace" in options) is tight
    assert all(isinstance(value, str) for value in options.values())


def test_tf32_follows_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(torch.device("cuda"))
    for precision, wanted in (("highest", "0"), ("high", "1")):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda precision=precision: precision)
        assert cuda_options(settings, 1, graph=False)["use_tf32"] == wanted


def test_memory_of_a_call_on_the_host() -> None:
    for size in (10 * 2**20, 100 * 2**20):
        taken = peak_of(lambda size=size: torch.ones(size, dtype=torch.uint8), CPU)
        if taken is None:
            pytest.skip("the kernel keeps no high-water mark")
        assert size <= taken <= size + 8 * 2**20


def test_addresses_of_the_allocator_are_numbers() -> None:
    options = TorchAllocator(torch.device("cuda"), None).options()
    assert sorted(options) == ["gpu_external_alloc", "gpu_external_empty_cache", "gpu_external_free"]
    assert all(re.fullmatch("[1-9][0-9]*", value) for value in options.values())


def test_inputs_that_no_node_reads_are_not_bound() -> None:
    class Second(nn.Module):
        def forward(self, input: torch.Tensor, input1: torch.Tensor, input2: torch.Tensor) -> torch.Tensor:
            return input1 * 2 + input2.shape[0]

    given = [torch.randn(3, 4) for _ in range(3)]
    session = Session(exported(Second(), *given), [torch.empty(3, 4)], Settings(CPU))
    assert session.inputs == ["input", "input1", "input2"]
    assert [entry.name for entry in session._session.get_inputs()] == ["input1"]
    torch.testing.assert_close(session.run(given)[0], given[1] * 2 + 3)
