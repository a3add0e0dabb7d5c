"""Gradients that nothing needs yet wait where memory is short: by hand on small graphs, on the same numbers."""

import pytest
import torch

from memopt.inductor.peak_lower_bound import backward_lower_bound
from memopt.inductor.weight_gradients import delay_weight_gradients
from tests.inductor.test_peak_lower_bound import graph_of

aten = torch.ops.aten
WIDE, ROWS = 40, 10  # a gradient of 6400 bytes of values of 1600


def forward(call, weight, x):
    values = [x]
    for _ in range(3):
        values.append(call(aten.mm.default, values[-1], weight))
    return [values[-1], weight, *values]


def backward(call, weight, a, b, c, out, tangent):
    found = call(aten.mm.default, call(aten.t.default, out), tangent)  # the first gradient, though it is the largest
    reader = call(aten.view.default, found, [WIDE * WIDE])
    for value in (c, b, a):
        tangent = call(aten.mm.default, tangent, weight)
        tangent = call(aten.mul.Tensor, tangent, value)
    return [tangent, call(aten.neg.default, reader)]


@pytest.fixture
def cut():
    weight, x = torch.randn(WIDE, WIDE), torch.randn(ROWS, WIDE)
    names = ("weight", "a", "b", "c", "out", "tangent")
    given = (weight, *(torch.randn(ROWS, WIDE) for _ in names[1:]))
    return (
        graph_of({"weight": weight, "x": x}, forward),
        graph_of(dict(zip(names, given, strict=True)), backward),
        given,
    )


def peak(forward, backward):
    return max(backward_lower_bound(forward, backward, 1)(list(backward.graph.nodes)))


def test_a_gradient_waits_until_there_is_room(cut):
    ahead, given, values = cut
    later = delay_weight_gradients(ahead, given, 1, lambda size: max(0, size - 1))
    assert peak(ahead, later) < peak(ahead, given)
    before, after = ([node.name for node in made.graph.nodes if node.op == "call_function"] for made in (given, later))
    _, sink, its_view, first, *_ = before
    assert sorted(after) == sorted(before) and after.index(sink) > after.index(first)
    assert after.index(its_view) == after.index(sink) + 1, "its view goes with it"
    later.graph.lint()
    for found, known in zip(later(*values), given(*values), strict=True):
        assert torch.equal(found, known)


def test_where_there_is_room_the_order_stays(cut):
    ahead, given, _ = cut
    most = peak(ahead, given)
    assert delay_weight_gradients(ahead, given, 1, lambda size: max(0, size - most)) is given


def test_what_is_needed_next_stays():
    weight = torch.randn(WIDE, WIDE)
    ahead = graph_of({"weight": weight}, lambda call, w: [call(aten.mm.default, w, w), w])

    def chain(call, w, tangent):
        first = call(aten.mm.default, tangent, w)
        return [call(aten.mm.default, call(aten.neg.default, first), w)]

    given = graph_of({"weight": weight, "tangent": weight}, chain)
    assert delay_weight_gradients(ahead, given, 1, lambda size: 1) is given
