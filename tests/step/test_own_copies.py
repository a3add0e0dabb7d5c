from __future__ import annotations

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import memopt
from memopt.program import Phase
from memopt.step.own_copies import copy_small_inputs, keep_small_inputs, recomputed_from

aten = torch.ops.aten


class Graph:
    def __init__(self) -> None:
        self.graph, self.mode = fx.Graph(), FakeTensorMode()

    def placeholder(self, name, *shape):
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(*shape)
        return node

    def call(self, target, *args, name, phase=Phase.BACKWARD, **meta):
        node = self.graph.create_node("call_function", target, args, name=name)
        node.meta = {"val": target(*fx.map_arg(args, lambda n: n.meta["val"])), "phase": phase, **meta}
        return node

    def module(self, *results):
        self.graph.output(tuple(results))
        return fx.GraphModule({}, self.graph)


def _graphs(*sizes):
    """Forward adds a bias, transposed, to a product and takes the hyperbolic tangent; backward does so anew."""
    first, second = Graph(), Graph()
    made, bias = first.placeholder("made", 100, 64), first.placeholder("bias", *sizes)
    turned = first.call(aten.t.default, bias, name="turned", phase=Phase.FORWARD)
    total = first.call(aten.add.Tensor, made, turned, name="total", phase=Phase.FORWARD)
    forward = first.module(total, made, turned)
    saved = second.placeholder("made", 100, 64), second.placeholder("turned", *sizes[::-1])
    tangent = second.placeholder("tangents_1", 100, 64)
    again = second.call(aten.add.Tensor, *saved, name="total", phase=Phase.FORWARD)
    gradient = second.call(aten.tanh_backward.default, tangent, again, name="gradient")
    return forward, second.module(gradient)


def test_forward_hands_over_a_copy_of_a_small_input_that_is_read_to_recompute() -> None:
    forward, backward = _graphs(64)
    keep_small_inputs(forward, backward, 1)
    names = [node.name for node in backward.graph.find_nodes(op="placeholder")]
    results = [node.name for node in forward.graph.output_node().args[0]]
    assert names == ["turned_kept", "made", "tangents_1"]
    assert results == ["total", "turned_kept", "made"]
    assert "bias" not in recomputed_from(forward, backward)
    made, bias, tangent = torch.randn(100, 64), torch.randn(64), torch.randn(100, 64)
    total, kept, saved = forward(made, bias)
    before = backward(kept, saved, tangent)[0]
    bias.add_(1)
    assert torch.equal(backward(kept, saved, tangent)[0], before)
    assert torch.equal(before, aten.tanh_backward(tangent, total))


def test_a_large_input_stays_an_input_and_is_named() -> None:
    forward, backward = _graphs(64, 100)
    before = str(backward.graph)
    keep_small_inputs(forward, backward, 1)
    assert str(backward.graph) == before
    assert recomputed_from(forward, backward) == ["made", "bias"]


def test_what_backward_reads_for_its_own_formulas_is_read_where_it_is() -> None:
    graph = Graph()
    bias, tangent = graph.placeholder("bias", 64), graph.placeholder("tangents_1", 64)
    made = graph.call(aten.tanh.default, bias, name="made", phase=Phase.FORWARD)
    again = graph.call(aten.tanh.default, bias, name="made_again", recomputes="made", recomputed=True)
    formula = graph.call(aten.mul.Tensor, tangent, bias, name="formula")
    gradient = graph.call(aten.add.Tensor, formula, again, name="gradient")
    graph.module(made, gradient)
    copy_small_inputs(graph.graph, {bias})
    copied = next(node for node in graph.graph.nodes if node.target is aten.clone.default)
    assert copied.meta["phase"] is Phase.FORWARD
    assert again.args == (copied,)
    assert formula.args == (tangent, bias)


def test_a_copy_is_proved_by_the_value_that_it_has():
    """A batch norm that is recomputed by another operator reads copies of its weights: its proof reads one value."""
    model = memopt.models.build("resnet18:tiny").train()
    inputs = model.example_inputs()
    report = memopt.plan(model, inputs)
    torch._dynamo.reset()
    budget = (report.minimum_bytes + report.unconstrained_bytes) // 2
    run = memopt.compile(model, budget, backend="aten")
    run(**inputs).sum().backward()
    (record,) = [record for record in run.report.passes if record.name == "checkpoint"]
    assert record.changes
