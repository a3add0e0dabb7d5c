"""Buffers that a step writes to: what they were is what forward and backward read, wherever Inductor's code writes."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import memopt
from memopt.capture.joint import mutations_in_place
from memopt.compilation.session import Session
from memopt.inductor.min_cut_partition import MinCutPartition
from memopt.program import Output, OutputKind
from tests.inductor.test_peak_lower_bound import needs_compiler

aten = torch.ops.aten


class Written(nn.Module):
    """Buffers that change places, are turned round, and are counted up after they were read for backward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)))
        for index, name in enumerate(("one", "other", "turned", "count")):
            self.register_buffer(name, torch.linspace(index, index + 1, 8))

    def forward(self, x):
        y = self.layers(x * self.count + self.one)
        before = self.count.clone()
        self.count.add_(1)
        kept = self.one.clone()
        self.one.copy_(self.other)
        self.other.copy_(kept)
        self.turned.copy_(self.turned.view(2, 4).flip(0).reshape(8))
        return (y * before * self.one + self.turned).sum()


@pytest.mark.quick("torch's own-cpu")
@needs_compiler
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("cut", ["as planned", "torch's own"])
def test_what_a_buffer_was_is_read_before_it_is_written_to(monkeypatch, cut, device):
    cuts, plain_cut = [], MinCutPartition.cut
    monkeypatch.setattr(
        MinCutPartition, "cut", lambda *given, **options: cuts.append(plain_cut(*given, **options)) or cuts[-1]
    )
    if cut == "as planned":
        monkeypatch.setattr(Session, "may_leave", lambda self, graph_break: False)
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Written().to(device)
    plain = copy.deepcopy(model)
    run = memopt.compile(model, "1GB", backend="inductor")
    for _ in range(3):
        x = torch.randn(64, 8, device=device)
        for step in (run, plain):
            step.zero_grad()
            step(x).backward()
        torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))
        wanted = [weight.grad for weight in plain.parameters()]
        torch.testing.assert_close([weight.grad for weight in model.parameters()], wanted, rtol=1e-4, atol=1e-4)
    assert any(graphs is not None for graphs in cuts) is (cut != "as planned")


def forward_graph(make):
    """A forward graph of two inputs of 4 numbers that it writes to, what it writes as its outputs behind one other."""
    graph = fx.Graph()
    result, *written = make(graph, *(graph.placeholder(name) for name in ("a", "b")))
    with FakeTensorMode():
        for node in graph.nodes:
            node.meta["val"] = torch.empty(4)
    graph.output((result, *written))
    outputs = Output(OutputKind.USER), *(Output(OutputKind.MUTATION, name) for name in ("a", "b"))
    module = fx.GraphModule(nn.Module(), graph)
    mutations_in_place(module, SimpleNamespace(outputs=outputs, forward_outputs=3), 1)
    module.graph.lint()
    return [node for node in module.graph.nodes if node.op == "call_function"]


def test_an_input_is_written_to_once_nothing_reads_what_it_was():
    def make(graph, a, b):
        more = graph.call_function(aten.add.Tensor, (a, 1))
        less = graph.call_function(aten.sub.Tensor, (b, 1))
        seen = graph.call_function(aten.view.default, (b, [2, 2]))
        square = graph.call_function(aten.mul.Tensor, (seen, seen))
        return graph.call_function(aten.sin.default, (square,)), more, less

    names = [str(node.target.overloadpacket.__name__) for node in forward_graph(make)]
    assert names == ["add", "copy_", "sub", "view", "mul", "copy_", "sin"]


def test_inputs_that_change_places_and_views_are_copied_before_anything_is_written():
    def make(graph, a, b):
        turned = graph.call_function(aten.flip.default, (graph.call_function(aten.view.default, (b, [2, 2])), [0]))
        return graph.call_function(aten.sin.default, (a,)), b, graph.call_function(aten.view.default, (turned, [4]))

    nodes = forward_graph(make)
    updates = [node for node in nodes if node.target is aten.copy_.default]
    assert [node.args[1].target for node in updates] == [aten.lift_fresh_copy.default] * 2
    first = nodes.index(updates[0])
    assert all(nodes.index(node.args[1]) < first for node in updates if node.args[1].args[0].op == "placeholder")


class WrittenInPart(nn.Module):
    """A part of a buffer is written to before backward is to read all of it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.linspace(1, 2, 16).reshape(4, 4))

    def forward(self, x):
        self.scale[0] = 0.5
        return x * self.scale


@needs_compiler
def test_backward_does_not_write_over_a_buffer_that_was_written_to_in_part():
    torch._dynamo.reset()
    model, x = WrittenInPart(), torch.linspace(-1, 1, 16).reshape(4, 4).requires_grad_()
    memopt.compile(model)(x).sin().sum().backward()
    expected = WrittenInPart()
    other = x.detach().clone().requires_grad_()
    expected(other).sin().sum().backward()
    torch.testing.assert_close([model.scale, x.grad], [expected.scale, other.grad])
