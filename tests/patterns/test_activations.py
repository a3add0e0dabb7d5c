"""Activations by hand: any way of writing one down is read, and nothing that differs from it is."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.graph.rewrite import Refused
from memopt.patterns.activations import spelling_of
from memopt.program import Program
from tests.passes.build import trace

aten = torch.ops.aten
X = torch.linspace(-4, 4, 33, dtype=torch.float64)
ROOT_HALF, ROOT_2_OVER_PI = math.sqrt(0.5), math.sqrt(2 / math.pi)


def read(function, x=X):
    """The spelling that ends in the function's result, as (operator, keyword arguments), and the program."""
    program: Program = trace(lambda x: (function(x),), x)
    found = spelling_of(program, program.output_nodes[0])
    return (None, None) if found is None else (found, program)


def assert_spells(function, x=X) -> None:
    """What was found computes what the function computes, and lists its nodes in order with the result last."""
    found, program = read(function, x)
    assert found is not None
    operand = found.x
    values = {program.placeholders[0]: x}
    for node in program.calls:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: values[n])
        values[node] = node.target(*args, **kwargs)
    torch.testing.assert_close(found.target(values[operand], **found.kwargs), function(x), rtol=1e-12, atol=1e-12)
    order = list(program.graph.nodes)
    assert list(found.nodes) == sorted(found.nodes, key=order.index)
    assert found.nodes[-1] is program.output_nodes[0] and operand not in found.nodes


scale = st.sampled_from([0.25, 0.5, 2.0, 4.0])


@settings(max_examples=40)
@given(scale, scale, st.booleans(), st.booleans(), st.sampled_from([1, -1]))
def test_gelu_however_its_factors_are_spread(a, b, swap, divide, sign) -> None:
    def gelu(x):
        inner = (x * (sign * ROOT_HALF * a)) / a if divide else x * (sign * ROOT_HALF)
        curve = sign * torch.erf(inner)
        sum_ = 1 + curve if swap else curve + 1
        return (x * (b / 2)) * sum_ / b

    assert_spells(gelu)


@settings(max_examples=40)
@given(scale, st.booleans(), st.booleans())
def test_tanh_gelu_however_its_polynomial_is_written(a, cube, nested) -> None:
    def gelu(x):
        power = x**3 if cube else x * x * x
        inner = x * (1 + 0.044715 * x * x) if nested else x + 0.044715 * power
        return (1 + torch.tanh(inner * ROOT_2_OVER_PI)) * (x * a) * (0.5 / a)

    assert_spells(gelu)


@settings(max_examples=40)
@given(scale, st.booleans())
def test_hard_activations_however_their_constants_are_spread(a, swish) -> None:
    def hard(x):
        gate = (x * (a / 6) + a / 2).clamp(0, a)
        return x * gate / a if swish else gate / a

    assert_spells(hard)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * torch.sigmoid(x),
        lambda x: x / (1 + torch.exp(-x)),
        lambda x: torch.reciprocal(1 + torch.exp(-x)),
        lambda x: x * torch.tanh(torch.nn.functional.softplus(x)),
        lambda x: x * torch.nn.functional.hardsigmoid(x),
    ],
    ids=["silu", "silu_by_division", "sigmoid", "mish", "hardswish"],
)
def test_the_other_forms(function) -> None:
    assert_spells(function)
    assert_spells(lambda x: function(x.sin()))


@settings(max_examples=60)
@given(st.sampled_from(range(6)), st.floats(1.1, 3), st.booleans())
def test_a_constant_that_is_another_is_never_taken_for_it(place, factor, down) -> None:
    wrong = [1.0] * 6
    wrong[place] = 1 / factor if down else factor

    def gelu(x):
        inner = x * (ROOT_HALF * wrong[0])
        return x * (0.5 * wrong[1]) * (wrong[2] + wrong[3] * torch.erf(inner))

    def hard(x):
        return x * (wrong[4] * x / 6 + 0.5 * wrong[5]).clamp(0, 1)

    for function in (gelu, hard):
        found, _ = read(function)
        if found is not None:
            torch.testing.assert_close(found.target(X, **found.kwargs), function(X), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + x * torch.sigmoid(2 * x),
        lambda x: x * x * torch.sigmoid(x),
        lambda x: x * torch.tanh(torch.nn.functional.softplus(x, beta=2)),
        lambda x: x / (1 + torch.exp(x)),
        lambda x: x / (2 + torch.exp(-x)),
        lambda x: x * (x / 6 + 0.5).clamp(0.1, 1),
        lambda x: x * 0.5 * (1 - torch.erf(x * ROOT_HALF)),
        lambda x: x.exp(),
        lambda x: x.sin(),
        lambda x: torch.div(x, 1 + torch.exp(-x), rounding_mode="floor"),
    ],
)
def test_what_is_none_is_none(function) -> None:
    assert read(function) == (None, None)


def test_a_near_miss_is_refused_with_its_size() -> None:
    with pytest.raises(Refused, match=r"form of gelu, but its constants are off by 1\.0e-04, more than torch.float64"):
        read(lambda x: x * 0.5 * (1 + torch.erf(x * ROOT_HALF * 1.0001)))


def test_a_sigmoid_of_another_multiple_is_refused() -> None:
    with pytest.raises(Refused, match=r"x \* sigmoid\(1\.702 x\), which is neither silu nor gelu"):
        read(lambda x: x * torch.sigmoid(1.702 * x))


def test_a_result_that_something_else_reads_is_refused() -> None:
    def function(x):
        gate = torch.sigmoid(x)
        return x * gate, gate

    program = trace(function, X)
    with pytest.raises(Refused, match="it spells out silu, but sigmoid has other users"):
        spelling_of(program, program.output_nodes[0])


@pytest.mark.parametrize("x", [torch.arange(4), torch.ones(3, dtype=torch.complex64)])
def test_only_real_numbers_have_activations(x) -> None:
    program = trace(lambda x: (x * x,), x)
    assert spelling_of(program, program.output_nodes[0]) is None


def test_shapes_that_broadcast_are_no_activation() -> None:
    found, _ = read(lambda x: x[:1] * torch.sigmoid(x))
    assert found is None


def test_long_expressions_end_the_search() -> None:
    def long(x):
        y = torch.sigmoid(x)
        for number in range(40):
            y = y + x * number
        return y

    assert read(long) == (None, None)
