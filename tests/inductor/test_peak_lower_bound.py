"""The least bytes of a cut: by hand on small graphs, and against the code that Inductor makes."""

import pytest
import torch
from torch import fx, nn

import memopt
from memopt.backends.inductor import missing_compiler
from memopt.inductor import min_cut_partition
from memopt.inductor.peak_lower_bound import peak_lower_bound

aten = torch.ops.aten
needs_compiler = pytest.mark.skipif(missing_compiler(torch.device("cpu")) is not None, reason="no C++ compiler")


def graph_of(inputs, build):
    """A graph module of placeholders of so many floats, and what `build` makes of them; values are real tensors."""
    graph = fx.Graph()
    given = []
    for name, value in inputs.items():
        node = graph.placeholder(name)
        node.meta["val"] = value
        given.append(node)

    def call(target, *args):
        node = graph.call_function(target, args)
        node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]))
        return node

    graph.output(tuple(build(call, *given)))
    return fx.GraphModule({}, graph)


def test_operands_and_results_of_library_calls_are_counted_and_what_lies_between_is_not():
    weight, x = torch.randn(10, 10), torch.randn(10, 10)

    def forward(call, x, weight):
        first = call(aten.mm.default, x, weight)  # 400 bytes
        fused = call(aten.sin.default, call(aten.cos.default, call(aten.exp.default, first)))  # one of three is stored
        return call(aten.mm.default, fused, weight), weight

    made = graph_of({"x": x, "weight": weight}, forward)
    tangent = graph_of(
        {"weight": weight, "tangent": torch.randn(10, 10)}, lambda call, w, t: [call(aten.mm.default, t, w)]
    )
    # Forward: an operand and its result; backward: the result that the caller holds, a tangent, the gradient.
    assert peak_lower_bound(made, tangent, 1) == int(0.97 * 1200)
    assert peak_lower_bound(made, graph_of({"weight": weight}, lambda call, w: [w]), 1) == int(0.97 * 800)


def test_what_is_saved_waits_for_its_last_reader():
    x = torch.randn(10, 10)
    saved = [torch.randn(10, 10) for _ in range(3)]

    def backward(call, a, b, c):
        first = call(aten.mm.default, a, b)
        return [call(aten.mm.default, first, c)]

    made = graph_of({"x": x}, lambda call, x: [x])
    inputs = dict(zip("abc", saved, strict=True))
    assert peak_lower_bound(made, graph_of(inputs, backward), 1) == int(0.97 * 4 * 400)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(64, 192), nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + nn.functional.gelu(self.out(mixed))


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [(nn.Conv2d(8 if i else 3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for i in range(3)]
        self.layers = nn.Sequential(*(layer for group in layers for layer in group), nn.MaxPool2d(2))

    def forward(self, x):
        return self.layers(x)


@pytest.mark.quick("attention")
@needs_compiler
@pytest.mark.parametrize(
    ("model", "shape"),
    [(nn.Sequential(Attention(), Attention()), (4, 32, 64)), (Convolutions(), (4, 3, 16, 16))],
    ids=["attention", "convolutions"],
)
def test_the_code_takes_no_less_and_not_much_more(monkeypatch, model, shape):
    torch._dynamo.reset()
    found = []

    def counted(forward, backward, outputs):
        found.append(peak_lower_bound(forward, backward, outputs))
        return found[-1]

    monkeypatch.setattr(min_cut_partition, "peak_lower_bound", counted)
    run = memopt.compile(model, backend="inductor")
    run(torch.randn(shape)).square().mean().backward()
    (session,) = run._memopt.sessions.values()
    (peaks,) = session._emitted.values()
    real = max(peaks.forward, peaks.backward)
    assert found[0] <= real <= 1.5 * found[0]
