"""Branches on what `torch.rand` draws: no break where the outcome is fixed, and the numbers after it are eager's."""

import operator

import pytest
import torch
from torch import nn

import memopt
from memopt.torch_compat.fixed_comparisons import fixed_comparisons, outcome

COMPARED = {
    (operator.lt, 0.0): False,
    (operator.lt, -1): False,
    (operator.lt, 1): True,
    (operator.lt, 0.5): None,
    (operator.le, 0.0): None,
    (operator.le, -0.1): False,
    (operator.le, 1.0): True,
    (operator.gt, 0.0): None,
    (operator.gt, 1.0): False,
    (operator.gt, -0.1): True,
    (operator.ge, 0.0): True,
    (operator.ge, 1.0): False,
    (operator.ge, 0.9): None,
    (operator.eq, 2.0): None,
}


def _node(compared, *args, dtype=torch.float32):
    graph = torch.fx.Graph()
    drawn = graph.call_function(torch.rand, ([],))
    drawn.meta["example_value"] = torch.empty((), dtype=dtype)
    return graph.call_function(compared, tuple(drawn if each is ... else each for each in args))


@pytest.mark.parametrize(("compared", "number"), COMPARED)
def test_the_outcome_is_known_where_it_goes_by_no_number_that_is_drawn(compared, number):
    wanted = COMPARED[compared, number]
    assert outcome(_node(compared, ..., number)) is wanted
    mirrored = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}.get(compared.__name__)
    if mirrored is not None:
        assert outcome(_node(getattr(operator, mirrored), number, ...)) is wanted
    assert outcome(_node(compared, ..., number, dtype=torch.bfloat16)) is None  # which may be rounded to 1


class Dropping(nn.Module):
    """As Whisper, Wav2Vec2 and BART drop layers."""

    def __init__(self, layerdrop):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.layerdrop = layerdrop

    def forward(self, x):
        for layer in self.layers:
            drawn = torch.rand([])
            skip = self.training and drawn < self.layerdrop
            if not skip or x is None:
                x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("layerdrop", [0.0, 1.0])
def test_layers_that_are_never_or_always_dropped_break_no_graph(layerdrop, tmp_path, monkeypatch):
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    model, x, found = nn.Sequential(Dropping(layerdrop), nn.Linear(8, 8)), torch.randn(4, 8), []
    call = memopt.compile(model, "100MB", backend="aten")
    for run in (model, call):
        torch.manual_seed(0)
        found.append((run(x), torch.rand(3)))
    for mine, wanted in zip(*reversed(found), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=0)
    assert call._memopt.sessions.graphs == 1 and call.report.notes == ()


def test_the_outcome_is_another_one_where_the_number_is():
    torch._dynamo.reset()
    model, x, graphs = Dropping(0.0), torch.randn(4, 8), []
    compiled = torch.compile(model, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    with fixed_comparisons():
        compiled(x)
        assert len(graphs) == 1
        model.layerdrop = 1.5
        torch.testing.assert_close(compiled(x), x, rtol=0, atol=0)
        model.layerdrop = 0.0
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)
    model.layerdrop = 0.5
    torch.manual_seed(3)
    wanted = model(x)
    with fixed_comparisons():
        torch.manual_seed(3)
        torch.testing.assert_close(compiled(x), wanted, rtol=0, atol=0)


def test_elsewhere_tracing_is_as_ever():
    torch._dynamo.reset()
    with fixed_comparisons():
        pass
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(Dropping(0.0), fullgraph=True, backend="eager")(torch.randn(4, 8))
