"""A compiled program is called with tensors like those that it was planned for, or says which one is not."""

import dataclasses

import pytest
import torch

from memopt.backends.inputs import UserInputs
from memopt.program import InputKind
from tests.passes.build import trace

X, W, C = torch.randn(2, 3), torch.randn(3, 4), torch.randn(4)


@pytest.fixture
def inputs():
    kinds = {1: InputKind.PARAMETER, 2: InputKind.CONSTANT}
    return UserInputs(trace(lambda x, w, c: (x @ w + c,), X, W, C, kinds=kinds))


def test_constants_are_no_arguments_and_parameters_are_not_the_caller_s(inputs):
    assert (inputs.count, inputs.positions) == (2, (0,))
    inputs.check([torch.randn(2, 3), W])
    inputs.check([torch.randn(2, 3), None])  # what a parameter is like is not asked at every call


@pytest.mark.parametrize(
    "wrong", [torch.randn(3, 3), X.double(), torch.randn(3, 2).t(), torch.empty(2, 3, device="meta"), 3, None]
)
def test_another_shape_dtype_layout_or_device_is_named(inputs, wrong):
    with pytest.raises(ValueError, match=r"^input x_1 is .*, but the plan is for .*\(2, 3\)|\[2, 3\]") as caught:
        inputs.check([wrong, W])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_too_few_or_too_many_are_counted(inputs, count):
    with pytest.raises(TypeError, match=f"^the program takes 2 arguments, {count} were given$"):
        inputs.check([X] * count)


def test_strides_that_no_element_sees_do_not_matter():
    inputs = UserInputs(trace(lambda x: (x + 1,), torch.randn(1, 3)))
    inputs.check([torch.randn(3, 1).t()])
    inputs.check([torch.randn(1, 6)[:, :3]])
    with pytest.raises(ValueError, match="but the plan is for"):
        inputs.check([torch.randn(1, 6)[:, ::2]])


def test_a_token_that_orders_effects_may_be_none():
    program = trace(lambda x, token: (x + 1,), X, torch.empty(0))
    inputs = UserInputs(dataclasses.replace(program))
    inputs.check([X, None])
    with pytest.raises(ValueError, match="is None, but"):
        inputs.check([None, None])


def test_a_boxed_call_gives_its_values_away(inputs):
    boxed = [torch.randn(2, 3), W]
    kept = list(boxed)
    found = inputs.unboxed(boxed)
    assert boxed == [] and all(value is old for value, old in zip(found, kept, strict=True))
    with pytest.raises(TypeError, match="2 arguments, 1 were given"):
        inputs.unboxed([X])
