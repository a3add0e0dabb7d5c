"""What writes an operator's results into given memory: overloads, numbers as tensors, and what was measured."""

import json

import pytest
import torch

from memopt.static.write import TABLE, is_true_out, number, number_like, out_overload, table
from tests.passes.build import trace

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("target", "overload"),
    [
        (aten.add.Tensor, aten.add.out),
        (aten.sum.dim_IntList, aten.sum.IntList_out),
        (aten.topk.default, aten.topk.values),
        (aten.full.default, aten.full.out),  # the arguments that lay the result out do not count
        (aten.arange.start_step, aten.arange.start_out),
    ],
)
def test_the_out_overload_computes_the_same_from_the_same_arguments(target, overload):
    assert out_overload(target) is overload


def test_an_overload_of_other_arguments_or_results_is_none():
    assert out_overload(aten.unbind.int) is None  # a list of results
    assert out_overload(aten._local_scalar_dense.default) is None  # a number


def test_only_what_was_measured_to_write_where_it_is_told_is_true():
    assert is_true_out(aten.add.out) and table()["aten.add.out"] == {"kind": "true", "slices": True}
    assert not is_true_out(aten.relu.out) and table()["aten.relu.out"]["kind"] == "copies"
    kinds = {entry["kind"] for entry in json.loads(TABLE.read_text())["overloads"].values()}
    assert {"true", "copies"} <= kinds


@pytest.mark.parametrize(
    ("value", "operand", "dtype"),
    [
        (2, torch.float64, torch.float64),
        (2, torch.int32, torch.int32),
        (2.5, torch.int32, torch.float32),  # as eager: a float beside integers is of the default dtype
        (2.5, torch.complex64, torch.complex64),
        (True, torch.bool, torch.bool),
        (3, torch.bool, torch.int64),
        (0.5, torch.float16, torch.float16),
        (0.1, torch.float16, torch.float32),  # float16 would round it
        (0.1, torch.bfloat16, torch.float32),
    ],
)
def test_a_number_as_a_tensor_acts_as_the_number_does(value, operand, dtype):
    x = torch.ones(3).to(operand)
    found = number_like(value, x)
    assert found.dtype is dtype and found.shape == ()
    torch.testing.assert_close(x * found, x * value, rtol=0, atol=0)


def test_a_number_is_made_for_the_first_operand_or_the_result():
    program = trace(lambda x: (x.mul(2), torch.full((2,), 3, dtype=torch.float64)), torch.ones(2, dtype=torch.float16))
    multiplied, filled = program.calls
    assert number(0.5, multiplied).dtype is torch.float16
    assert number(0.5, filled).dtype is torch.float64
