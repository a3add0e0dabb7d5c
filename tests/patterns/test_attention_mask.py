"""The mask that fused attention takes for what is done to the scores."""

import math

import pytest
import torch
from torch import fx

from memopt.graph.rewrite import Refused
from memopt.patterns.attention import attention_of
from memopt.patterns.attention_mask import Masks
from tests.passes.build import trace

aten = torch.ops.aten
Q, K, V = (torch.randn(2, 3, 4, 8) for _ in range(3))
HIDES = torch.ones(4, 4, dtype=torch.bool).triu(1)


def masked(change, *more):
    """The mask of `softmax(change(Q K^T)) V`."""
    program = trace(lambda q, k, v, *more: (change(q @ k.mT, *more).softmax(-1) @ v,), Q, K, V, *more)

    def call(before, target, arguments, kwargs=None):
        with program.graph.inserting_before(before):
            node = program.graph.call_function(target, arguments, kwargs or {})
        values = fx.map_arg((arguments, kwargs or {}), lambda item: item.meta["val"])
        with before.meta["val"].fake_mode:
            node.meta["val"] = target(*values[0], **values[1])
        return node

    masks = Masks(program, call, lambda node, shape, before: call(before, aten.view.default, (node, list(shape))))
    (softmax,) = (node for node in program.calls if node.target is aten._softmax.default)
    found = attention_of(program, softmax)
    assert found is not None and masks.of(found) is masks.of(found), "it is made once"
    return masks.of(found)


def test_scores_that_are_scaled_alone_need_none():
    mask = masked(lambda scores: scores / math.sqrt(8))
    assert (mask.node, mask.causal, mask.scale) == (None, False, pytest.approx(8**-0.5))


@pytest.mark.parametrize("fill", [-math.inf, -1e9], ids=["infinity", "a low number"])
def test_a_triangle_is_causal(fill):
    mask = masked(lambda scores: (scores * 0.5).masked_fill(torch.ones(4, 4).triu(1).bool(), fill))
    assert (mask.node, mask.causal, mask.scale) == (None, True, 0.5)


def test_what_the_caller_gives_is_added_as_it_is_scaled():
    mask = masked(lambda scores, bias: (scores + bias) * 2.0, torch.randn(4, 4))
    assert mask.node is not None and not mask.causal and mask.scale == 2.0 and mask.read == frozenset()


def test_a_number_that_hides_nothing_for_certain_is_refused():
    with pytest.raises(Refused, match="scores are replaced by -5, which does not hide them for certain"):
        masked(lambda scores, hides: scores.masked_fill(hides, -5.0), HIDES)


def test_a_row_that_may_be_hidden_wholly_by_a_number_is_refused():
    with pytest.raises(Refused, match="by hand it is the mean of all values"):
        masked(lambda scores, hides: scores.masked_fill(hides, -1e9), HIDES)
