"""How a node's operands lie along the batch."""

import pytest
import torch

from memopt.patterns.batch import Batched, NotBatched, Summed
from memopt.patterns.batch_operands import apart, batched, first, place
from tests.passes.build import trace

aten = torch.ops.aten
X = torch.randn(4, 4)


@pytest.fixture
def product():
    """A product, and its two operands."""
    (node,) = (call for call in trace(lambda x, w: (x @ w,), X, X.clone()).calls if call.target is aten.mm.default)
    return node, *node.all_input_nodes


def test_an_argument_is_batched_or_independent_and_a_sum_is_neither(product):
    _, x, w = product
    states = {x: Batched(0), w: None}
    assert batched(x, states) == Batched(0) and batched(w, states) is batched(3.0, states) is None
    with pytest.raises(AssertionError):
        batched(x, {x: Summed()})


def test_the_first_operand_is_to_be_the_only_one_that_is_batched(product):
    node, x, w = product
    assert first(node, {x: Batched(1, 2), w: None}) == (x, Batched(1, 2))
    for states, named in (({x: Batched(0), w: Batched(0)}, w.name), ({x: None, w: None}, "no operand")):
        with pytest.raises(NotBatched, match=f"aten.mm.default with a batch in {named}: no rule"):
            first(node, states)


def test_arguments_are_found_by_name_and_work_along_the_batch_is_refused(product):
    node, _, _ = product
    assert place(node, "mat2") == 1
    apart(node, Batched(1), [0, -3], 3)
    with pytest.raises(NotBatched, match="works along dimension 1, which is the batch"):
        apart(node, Batched(1), [-2], 3)
