"""The bytes that a cut is expected to take: by hand on small graphs, and against the code that Inductor makes."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._inductor import config

import memopt
from memopt.inductor import min_cut_partition, peak_estimate
from memopt.inductor.peak_estimate import expected_bytes
from memopt.inductor.peak_lower_bound import peak_lower_bound
from memopt.memory.hand_over import mark_handed
from tests.inductor.test_peak_lower_bound import Attention, Convolutions, graph_of, needs_compiler

aten = torch.ops.aten


def test_what_is_fused_takes_nothing_and_a_kernel_writes_over_what_it_reads_last():
    weight, x = torch.randn(10, 10), torch.randn(10, 10)

    def forward(call, x, weight):
        first = call(aten.mm.default, x, weight)  # 400 bytes
        fused = call(aten.sin.default, call(aten.neg.default, first))  # in the place of the first
        return call(aten.mm.default, fused, weight), weight

    made = graph_of({"x": x, "weight": weight}, forward)
    nothing = graph_of({"weight": weight}, lambda call, w: [w])
    assert expected_bytes(made, nothing, 1) == 800


def test_what_a_fused_value_is_computed_from_waits_for_its_reader():
    weight, x = torch.randn(10, 10), torch.randn(10, 10)

    def forward(call, x, weight):
        first = call(aten.mm.default, x, weight)
        fused = call(aten.neg.default, first)  # computed where it is read
        second = call(aten.mm.default, x, x)
        return call(aten.add.Tensor, second, fused), weight

    made = graph_of({"x": x, "weight": weight}, forward)
    nothing = graph_of({"weight": weight}, lambda call, w: [w])
    assert expected_bytes(made, nothing, 1) == 800  # the first and the second; the sum goes over one of them


def test_gradients_that_are_handed_over_are_gone_once_nothing_reads_them():
    weight, tangent = torch.randn(10, 10), torch.randn(10, 10)

    def backward(call, t, w):  # two gradients of weights, each beside what is multiplied next; one of the input
        first = call(aten.mm.default, t, t)
        second = call(aten.mm.default, t, w)
        third = call(aten.mm.default, second, second)
        last = call(aten.mm.default, second, w)
        return first, third, last, first

    forward = graph_of({"w": weight}, lambda call, w: [w])
    results = {}
    for handed in ((), (1,), (0, 1, 3), (0, 1)):
        made = graph_of({"t": tangent, "w": weight}, backward)
        outputs = [SimpleNamespace(handed=number in handed) for number in range(4)]
        mark_handed(made, SimpleNamespace(outputs=[None, *outputs], forward_outputs=1))
        results[handed] = expected_bytes(forward, made, 1), peak_lower_bound(forward, made, 1)
    assert results[()] == (1600, int(0.97 * 1600)), "three results beside what they are made of"
    assert results[(1,)] == (1200, int(0.97 * 1200)), "the third is gone when the last is made"
    assert results[(0, 1, 3)] == (800, int(0.97 * 800)), "the first is gone when the second is made"
    assert results[(0, 1)] == results[(1,)], "what is a result of another place as well stays"


def test_forward_is_looked_at_once_whatever_order_backward_has(monkeypatch):
    looked_at, real = [], peak_estimate._peak
    monkeypatch.setattr(peak_estimate, "_peak", lambda module, *rest: looked_at.append(module) or real(module, *rest))
    weight = torch.randn(10, 10)
    forward, *backwards = (graph_of({"w": weight}, lambda call, w: [call(aten.mm.default, w, w), w]) for _ in range(3))
    found = [expected_bytes(forward, backward, 1) for backward in (*backwards, backwards[1])]
    assert looked_at == [forward, *backwards]
    assert found[0] == found[1] == found[2]


def test_backward_has_what_was_saved_and_what_the_caller_holds():
    weight, x = torch.randn(10, 10), torch.randn(10, 10)
    made = graph_of({"x": x, "weight": weight}, lambda call, x, w: (call(aten.mm.default, x, w), w))
    tangent = graph_of(
        {"weight": weight, "tangent": torch.randn(10, 10)}, lambda call, w, t: [call(aten.mm.default, t, w)]
    )
    assert expected_bytes(made, tangent, 1) == 1200


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize(
    ("model", "shape", "most"),
    [(nn.Sequential(Attention(), Attention()), (4, 32, 64), 1.2), (Convolutions(), (4, 3, 16, 16), 1.5)],
    ids=["attention", "convolutions"],
)
def test_the_code_takes_about_as_much(monkeypatch, model, shape, most):
    torch._dynamo.reset()
    found = []

    def counted(*cut):
        found.append((expected_bytes(*cut), peak_lower_bound(*cut)))
        return found[-1][0]

    monkeypatch.setattr(min_cut_partition, "expected_bytes", counted)
    run = memopt.compile(model, backend="inductor")
    run(torch.randn(shape)).square().mean().backward()
    (session,) = run._memopt.sessions.values()
    (peaks,) = session._emitted.values()
    real = max(peaks.forward, peaks.backward)
    expected, least = found[0]
    assert least <= expected <= real and real <= most * expected


@pytest.mark.parametrize("relaid", [True, False])
def test_an_input_that_is_saved_in_another_layout_is_there_twice(relaid):
    aten = torch.ops.aten
    given = {"x": torch.randn(2, 3, 8, 8), "wide": torch.randn(4, 3, 3, 3), "narrow": torch.randn(4, 4, 1, 1)}

    def forward(call, x, wide, narrow):
        def convolved(value, weight):
            return call(aten.convolution.default, value, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)

        return [call(aten.sum.default, convolved(convolved(x, wide), narrow)), x, wide, narrow]

    made, back = (
        graph_of(given, forward),
        graph_of({"wide": given["wide"]}, lambda call, wide: [call(aten.neg.default, wide)]),
    )
    plain = graph_of(given, lambda *args: forward(*args)[:1])
    with config.patch(layout_optimization=relaid, force_layout_optimization=relaid):
        found = expected_bytes(made, back, 1)
        assert expected_bytes(plain, back, 1) + 4 * (2 * 3 * 64 + 4 * 27) * relaid == found, "one by one lies so anyway"
