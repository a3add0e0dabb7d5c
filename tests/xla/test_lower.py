from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

jax = pytest.importorskip("jax")
if importlib.util.find_spec("torchax") is None:
    pytest.skip("needs torchax", allow_module_level=True)

from memopt.capture.export import from_module  # noqa: E402
from memopt.memory.cost.elsewhere import moved  # noqa: E402
from memopt.program import Program  # noqa: E402
from memopt.xla.lower import lower, precision  # noqa: E402
from memopt.xla.table import LowerError  # noqa: E402
from tests.end_to_end import build  # noqa: E402


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def to_jax(value: torch.Tensor) -> Any:
    return jax.numpy.asarray(value.numpy()) if value.dtype is torch.bool else jax.dlpack.from_dlpack(value.detach())


def to_torch(value: Any) -> torch.Tensor:
    return torch.from_dlpack(value) if value.dtype != bool else torch.from_numpy(jax.device_get(value).copy())


def arguments(program: Program, inputs: Any) -> list[torch.Tensor]:
    rest = iter(pytree.tree_leaves(inputs))
    return [program.state[entry.name] if entry.name in program.state else next(rest) for entry in program.inputs]


def run(program: Program, inputs: Any, key: tuple[int, int] = (0, 0)) -> list[torch.Tensor]:
    lowered = lower(program)
    with precision(lowered.x64):
        given = [to_jax(value.contiguous()) for value in arguments(program, inputs)]
        given += [jax.numpy.asarray(key, jax.numpy.uint32)] if lowered.random else []
        return [to_torch(value) for value in jax.jit(lowered.function)(*given)]


def of(function: Callable[..., Any], *args: torch.Tensor) -> list[torch.Tensor]:
    return run(from_module(Function(function), args), args)


@pytest.mark.quick("gpt2", "densenet121")
@pytest.mark.parametrize("name", ["mobilenet_v3_large", "densenet121", "gpt2", "bert_base"])
def test_models(name: str) -> None:
    model, inputs = build(name, labels=False)
    program = from_module(model.eval(), (), inputs)
    expected = torch.fx.Interpreter(program.graph_module).run(*arguments(program, inputs), enable_io_processing=False)
    for found, value in zip(run(program, inputs), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-5)


def test_64_bit_integers_are_exact() -> None:
    x = torch.tensor([3, -7], dtype=torch.int64)
    (found,) = of(lambda x: x * 3_000_000_000 + 1, x)
    assert found.dtype is torch.int64 and found.tolist() == [9_000_000_001, -20_999_999_999]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2**40, lambda x: torch.add(x, x, alpha=2**40), lambda x: x > 2**40, lambda x: 2**40 - x,
        lambda x: x.clamp(max=2**40), lambda x: x.masked_fill(x > 0, -(2**63)), lambda x: x / 2**40,
        lambda x: x[1 : 2**62].int() == 2**40,
    ],
)  # fmt: skip
def test_literals_of_64_bits_beside_smaller_numbers(function: Callable[..., Any]) -> None:
    x = torch.randn(4)
    (found,) = of(function, x)
    torch.testing.assert_close(found, function(x))


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (lambda x: torch.full_like(x, 2**40), "full_like"), (lambda x: x.clamp(max=2**40), "clamp"),
        (lambda x: x.masked_fill(x > 0, 2**40), "masked_fill"), (lambda x: x.to(torch.int8).clamp(min=-129), "clamp"),
    ],
)  # fmt: skip
def test_a_literal_that_does_not_fit_is_named(function: Callable[..., Any], operator: str) -> None:
    with pytest.raises(
        LowerError, match=rf"^aten\.{operator}\.\w+ \(.*test_lower\.py:\d+, .*\): -?\d+ does not fit in int"
    ):
        of(function, torch.arange(4, dtype=torch.int32))


def test_a_literal_beyond_64_bits_is_named() -> None:
    with pytest.raises(LowerError, match=r"^aten\.mul\.Tensor \(.*test_lower\.py:\d+, .*overflow") as found:
        of(lambda x: x * 2**63, torch.randn(4))
    assert "\n" not in str(found.value)


def test_no_64_bit_numbers_where_the_program_has_none() -> None:
    program = from_module(Function(lambda x: torch.softmax(x, 0) * 2.5), (torch.randn(3),))
    lowered = lower(program)
    assert not lowered.x64
    with precision(True):
        text = jax.jit(lowered.function).lower(*lowered.arguments()).as_text()
    assert "f64" not in text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_computed_as_pytorch_computes_them(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 33).to(dtype)

    def function(x: torch.Tensor) -> Any:
        scaled, normal = x * 0.1, nn.functional.layer_norm(x, (33,))
        return scaled, normal, x.softmax(1), x.sum(1), x.exp(), nn.functional.gelu(x)

    for found, expected in zip(of(function, x), function(x), strict=True):
        assert found.dtype is dtype
        torch.testing.assert_close(found, expected, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


def test_an_operator_without_a_lowering_is_named_with_its_source_line() -> None:
    with pytest.raises(LowerError, match=r"^aten\.special_airy_ai\.default \(.*test_lower\.py:\d+, .*\) has no form"):
        lower(from_module(Function(lambda x: torch.special.airy_ai(x)), (torch.randn(3),)))


def test_a_dtype_without_a_form_is_named() -> None:
    program = from_module(Function(lambda x: x.to(torch.float8_e4m3fn).float()), (torch.randn(3),))
    with pytest.raises(LowerError, match=r"float8_e4m3fn has no form under XLA"):
        jax.eval_shape(lower(program).function, *lower(program).arguments())


def test_random_numbers_follow_the_key_and_differ_between_draws() -> None:
    program = from_module(Function(lambda x: (torch.rand_like(x), torch.randn_like(x), torch.rand_like(x))), (
        torch.zeros(20_000),))  # fmt: skip
    x = torch.zeros(20_000)
    first, again, other = (run(program, x, key) for key in ((1, 2), (1, 2), (1, 3)))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0]) and not torch.equal(first[0], first[2])
    assert abs(float(first[0].mean()) - 0.5) < 0.01 and abs(float(first[1].std()) - 1) < 0.02
    assert float(first[0].min()) >= 0 and float(first[0].max()) < 1


def test_dropout_keeps_the_share_and_the_mean() -> None:
    x = torch.ones(50_000)
    (found,) = run(from_module(Function(lambda x: nn.functional.dropout(x, 0.3, True)), (x,)), x)
    kept = found != 0
    assert abs(float(kept.float().mean()) - 0.7) < 0.01
    torch.testing.assert_close(found[kept], torch.full_like(found[kept], 1 / 0.7))


@pytest.mark.parametrize("indices", [False, True])
def test_max_pooling_with_and_without_its_places(indices: bool) -> None:
    x = torch.randn(2, 3, 7, 9)
    x[0, 0, 2, 3] = float("nan")
    x[1] = -torch.inf

    def pool(x: torch.Tensor) -> Any:
        found, where = torch.nn.functional.max_pool2d(x, 3, 2, 1, ceil_mode=True, return_indices=True)
        return (found, where) if indices else found

    expected = pool(x)
    for found, value in zip(of(pool, x), expected if indices else (expected,), strict=True):
        torch.testing.assert_close(found, value, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_convolution_with_what_follows_it_is_near_float64(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight, bias, skip = (torch.randn(s).to(dtype) for s in ((2, 8, 6, 6), (8, 8, 3, 3), (8,), (2, 8, 6, 6)))

    def block(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.conv2d(x, weight, bias, padding=1) + skip).relu()

    exact = block(*(value.double() for value in (x, weight, bias, skip)))
    (found,) = of(block, x, weight, bias, skip)
    ours = (found.double() - exact).abs().max()
    assert found.dtype is dtype and ours <= 2 * (block(x, weight, bias, skip).double() - exact).abs().max()


def test_the_saved_statistics_of_a_batch_norm_are_those_of_the_device_it_was_captured_on() -> None:
    def evaluated(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> Any:
        return torch.ops.aten._native_batch_norm_legit_no_training(x, None, None, mean, variance, 0.1, 1e-5)

    torch.manual_seed(0)
    given = torch.randn(2, 4, 3, 3).half(), torch.randn(4).half(), torch.rand(4).half()
    program = from_module(Function(evaluated), given)
    result, *empty = run(program, given)
    assert [tuple(value.shape) for value in empty] == [(0,), (0,)]
    again, mean, inverse = run(moved(program, "cuda"), given)
    assert torch.equal(again, result) and torch.equal(mean, given[1].float())
    torch.testing.assert_close(inverse, (given[2].float() + 1e-5).rsqrt())


def test_a_model_captured_on_cuda_in_half_precision() -> None:
    model, inputs = build("densenet121", labels=False)
    program = from_module(model.half().eval(), (), {name: value.half() for name, value in inputs.items()})
    lowered = lower(moved(program, "cuda"), platform="cuda")
    found = jax.eval_shape(lowered.function, *lowered.arguments())
    assert [tuple(value.shape) for value in found] == [tuple(node.meta["val"].shape) for node in program.output_nodes]
