"""Clamps: composition against torch itself, NaN, infinities and crossed bounds included."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from memopt.patterns.clamps import Bounds, bounds_of, changes_nothing

aten = torch.ops.aten
VALUES = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e30, -1e30, *torch.linspace(-3, 3, 25).tolist()]


def chain(*steps, dtype=torch.float32):
    """A graph of `steps`, each (operator, *further arguments), on one input with metadata."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = torch.empty(len(VALUES), dtype=dtype, device="meta")
    for target, *args in steps:
        node = graph.call_function(target, (node, *args))
        node.meta["val"] = torch.empty(len(VALUES), dtype=dtype, device="meta")
    return node


bound = st.one_of(st.none(), st.sampled_from([-2, -1, 0, 1, 2, 0.5, math.inf, -math.inf]), st.floats(-3, 3, width=32))
step = st.one_of(
    st.just((aten.relu.default,)),
    st.tuples(st.just(aten.clamp.default), bound, bound).filter(lambda item: item[1:] != (None, None)),
    st.tuples(st.just(aten.hardtanh.default), st.floats(-3, 0, width=32), st.floats(0, 3, width=32)),
    st.tuples(st.sampled_from([aten.clamp_min.default, aten.clamp_max.default]), st.floats(-3, 3, width=32)),
)


@settings(max_examples=300)
@given(st.lists(step, min_size=1, max_size=5), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_a_chain_is_one_clamp(steps, dtype):
    x = torch.tensor(VALUES, dtype=dtype)
    expected, bounds = x, Bounds(-math.inf, math.inf)
    for target, *args in steps:
        expected = target(expected, *args)
        bounds = bounds.then(bounds_of(chain((target, *args), dtype=dtype)))
    if bounds == Bounds(-math.inf, math.inf):
        torch.testing.assert_close(x, expected, rtol=0, atol=0, equal_nan=True)
        return
    target, (_, *args) = bounds.call(None)
    torch.testing.assert_close(target(x, *args), expected, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=200)
@given(step, step)
def test_what_changes_nothing_changes_nothing(first, second):
    x = torch.tensor(VALUES)
    inner = first[0](x, *first[1:])
    if changes_nothing(chain(first, second)):
        torch.testing.assert_close(second[0](inner, *second[1:]), inner, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([(aten.abs.default,), (aten.abs.default,)], True),
        ([(aten.floor.default,), (aten.floor.default,)], True),
        ([(aten.floor.default,), (aten.ceil.default,)], False),
        ([(aten.relu.default,), (aten.relu.default,)], True),
        ([(aten.sigmoid.default,), (aten.relu.default,)], True),
        ([(aten.sigmoid.default,), (aten.sigmoid.default,)], False),
        ([(aten.sigmoid.default,), (aten.clamp.default, 0, 1)], True),
        ([(aten.sigmoid.default,), (aten.clamp.default, 0.1, 1)], False),
        ([(aten.exp.default,), (aten.relu.default,)], True),
        ([(aten.clamp.default, 0, 6), (aten.relu.default,)], True),
        ([(aten.clamp.default, -1, 6), (aten.relu.default,)], False),
        ([(aten.tanh.default,), (aten.relu.default,)], False),
        ([(aten.relu.default,)], False),
    ],
)
def test_idempotent_and_nested(steps, expected):
    assert changes_nothing(chain(*steps)) is expected


def test_bounds_of_what_has_none():
    assert bounds_of(chain((aten.tanh.default,))) is None
    assert bounds_of(chain((aten.clamp.default, math.nan, 1.0))) is None
    assert bounds_of(chain((aten.clamp.default, 0, 3), dtype=torch.int64)) is None
    assert changes_nothing(chain((aten.abs.default,)).args[0]) is False
    assert bounds_of(chain((aten.clamp.default, 5, 2))) == Bounds(2, 2)
    assert bounds_of(chain((aten.hardtanh.default,))) == Bounds(-1.0, 1.0)
