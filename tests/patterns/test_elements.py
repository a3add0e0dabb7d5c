"""What single nodes do to the elements of their operand."""

from __future__ import annotations

import pytest
import torch

from memopt.patterns.elements import factor_of, keeps_order, number_of, permutation, readers, swaps, widens
from tests.passes.build import trace

X = torch.randn(2, 1, 3, 4)


def node_of(function, *inputs):
    program = trace(lambda *given: (function(*given),), *inputs)
    return program, program.calls[-1]


@pytest.mark.parametrize(
    ("function", "keeps"),
    [
        (lambda x: x.view(6, 4), True),
        (lambda x: x.transpose(0, 1), True),  # a dimension of size 1 moves freely
        (lambda x: x.transpose(2, 3), False),
        (lambda x: x.expand(2, 1, 3, 4), True),
        (lambda x: x.expand(2, 5, 3, 4), False),
        (lambda x: x + 1, False),
    ],
)
def test_order_is_kept_by_reshapes_and_by_moves_of_nothing(function, keeps):
    assert keeps_order(node_of(function, X)[1]) == keeps


def test_permutations_by_whatever_operator():
    assert permutation(node_of(lambda x: x.permute(0, -1, 1, 2), X)[1]) == [0, 3, 1, 2]
    assert permutation(node_of(lambda x: x.transpose(1, 3), X)[1]) == [0, 3, 2, 1]
    assert permutation(node_of(lambda x: x.t(), X[0, 0])[1]) == [1, 0]
    assert permutation(node_of(lambda x: x.view(24), X)[1]) is None


def test_matrices_are_transposed_by_a_swap_of_their_own_dimensions_only():
    assert swaps(node_of(lambda x: x.transpose(2, 3), X)[1], 3, 4)
    assert not swaps(node_of(lambda x: x.transpose(2, 3), X)[1], 4, 3)
    assert not swaps(node_of(lambda x: x.transpose(0, 3), X)[1], 3, 4)


def test_casts_that_only_add_precision():
    half = X.half()
    assert widens(node_of(lambda x: x.float(), half)[1])
    assert not widens(node_of(lambda x: x.half(), X)[1])
    assert not widens(node_of(lambda x: x.bfloat16(), half)[1])  # loses bits of float16
    assert not widens(node_of(lambda x: x.float(), X.int())[1])


def test_factors_are_finite_numbers_other_than_zero():
    assert factor_of(*node_of(lambda x: x * 3, X)) == 3.0
    assert factor_of(*node_of(lambda x: x / 4, X)) == 0.25
    assert factor_of(*node_of(lambda x: x * 0, X)) is None
    assert factor_of(*node_of(lambda x: x * float("inf"), X)) is None
    assert factor_of(*node_of(lambda x: x * x, X)) is None
    assert factor_of(*node_of(lambda x: x + 3, X)) is None


def test_numbers_are_read_where_the_program_knows_them():
    program, node = node_of(lambda x: torch.where(x > 0, x, torch.full((), -7.0)), X)
    assert number_of(program, node.args[2]) == -7.0
    assert number_of(program, 2) == 2.0
    assert number_of(program, node.args[1]) is None and number_of(program, None) is None


def test_checks_of_metadata_read_nothing():
    program, add = node_of(lambda x: x + 1, X)
    (x,) = program.placeholders
    with program.graph.inserting_before(add):
        program.graph.call_function(torch.ops.aten._assert_tensor_metadata.default, (x,))
    assert len(x.users) == 2 and readers(x) == [add]
