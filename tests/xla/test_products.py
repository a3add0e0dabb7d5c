"""Lowerings of matrix products in half types: never multiplied in float32, whole vectors where kernels want them."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

jax = pytest.importorskip("jax")
if importlib.util.find_spec("torchax") is None:
    pytest.skip("needs torchax", allow_module_level=True)

from memopt.capture.export import from_module  # noqa: E402
from memopt.memory.cost.elsewhere import moved  # noqa: E402
from memopt.xla.lower import lower  # noqa: E402
from tests.xla.test_gradients import on  # noqa: E402
from tests.xla.test_lower import Function  # noqa: E402

aten = torch.ops.aten


def check(function: Any, *given: torch.Tensor) -> None:
    """On both platforms no further from float64 than twice what PyTorch is, or two units in the last place."""
    exact = function(*(value.double() for value in given))
    allowed = max(
        2 * float((function(*given).double() - exact).abs().max()),
        2 * torch.finfo(given[0].dtype).eps * float(exact.abs().max()),
    )
    for platform in ("cpu", "cuda"):
        found = on(platform, function, *given)
        assert found.dtype is given[0].dtype
        assert float((found.double() - exact).abs().max()) <= allowed


def text_of(function: Any, *given: torch.Tensor) -> str:
    """What is made of the function for CUDA."""
    lowered = lower(moved(from_module(Function(function), given), "cuda"), platform="cuda")
    traced = jax.jit(lowered.function).trace(*lowered.arguments()).lower(lowering_platforms=("cuda",))
    return str(traced.as_text())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("use_gelu", [False, True])
def test_a_product_with_an_activation(dtype: torch.dtype, use_gelu: bool) -> None:
    torch.manual_seed(0)
    bias, x, y = (torch.randn(shape).to(dtype) for shape in ((24,), (16, 32), (32, 24)))

    def function(bias: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> Any:
        return aten._addmm_activation(bias, x, y, use_gelu=use_gelu)

    check(function, bias, x, y)
    dots = [line for line in text_of(function, bias, x, y).splitlines() if "dot_general" in line]
    assert len(dots) == 1 and "f32" not in dots[0]


@pytest.mark.parametrize(
    ("shapes", "turned", "inner"),
    [
        (((16, 50), (50, 24)), (False, False), 56), (((50, 16), (16, 24)), (False, False), 16),
        (((16, 50), (16, 24)), (True, False), 16), (((16, 50), (24, 50)), (False, True), 56),
        (((50, 16), (24, 50)), (True, True), 56), (((16, 32), (32, 50)), (False, False), 32),
    ],
)  # fmt: skip
def test_operands_are_whole_vectors(shapes: Any, turned: tuple[bool, bool], inner: int) -> None:
    torch.manual_seed(0)
    x, y = (torch.randn(shape).bfloat16() for shape in shapes)

    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        return (x.t() if turned[0] else x) @ (y.t() if turned[1] else y)

    check(function, x, y)
    (dot,) = (line for line in text_of(function, x, y).splitlines() if "dot_general" in line)
    rows = -(-x.shape[1] // 8) * 8 if turned[0] else x.shape[0]
    assert f"tensor<{rows}x{inner}xbf16>" in dot
