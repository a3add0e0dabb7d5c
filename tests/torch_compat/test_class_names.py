"""Names of classes and functions that lie in graphs are strings: a model that asks them is one graph."""

import pytest
import torch
from torch import nn
from torch._dynamo.variables import builtin

import memopt
from memopt.torch_compat.class_names import class_names

ASKED = {
    "startswith": lambda kind: kind.__module__.startswith("torchao."),
    "in": lambda kind: "arameter" in kind.__qualname__,
    "len": lambda kind: len(kind.__name__) == 9,
    "split": lambda kind: kind.__module__.split(".")[0] == "torch",
    "equal": lambda kind: kind.__name__ == "Parameter",
    "got": lambda kind: getattr(kind, "__name__", "").lower() == "parameter",
}


class Asks(nn.Module):
    """As PEFT's layers, which look for weights of other libraries by the names of their classes."""

    def __init__(self, asked, of):
        super().__init__()
        self.linear, self.asked, self.of = nn.Linear(4, 4), ASKED[asked], of

    def forward(self, x):
        kind = type(self.linear.weight) if self.of == "weight" else torch.relu
        return self.linear(x) * (2.0 if self.asked(kind) else 3.0)


@pytest.mark.parametrize("of", ["weight", "function"])
@pytest.mark.parametrize("asked", ASKED)
def test_a_name_is_a_string_of_one_graph(asked, of):
    torch._dynamo.reset()
    model, x = Asks(asked, of), torch.randn(2, 4)
    with class_names():
        found = torch.compile(model, backend="eager", fullgraph=True)(x)
    torch.testing.assert_close(found, model(x))


def test_another_class_of_the_weight_is_seen():
    torch._dynamo.reset()
    model, x = Asks("equal", "weight"), torch.randn(2, 4)
    compiled = memopt.compile(model, backend="aten")
    torch.testing.assert_close(compiled(x), model(x))
    weight = model.linear.weight.detach()
    del model.linear.weight
    model.linear.weight = weight
    torch.testing.assert_close(compiled(x), model(x))


def test_layers_that_ask_are_one_graph_within_a_budget():
    torch._dynamo.reset()
    model = nn.Sequential(*(Asks("startswith", "weight") for _ in range(3)))
    compiled, x = memopt.compile(model, "1MB", backend="aten"), torch.randn(8, 4)
    compiled(x).sum().backward()
    assert [program.kind for program in compiled.report.programs] == ["training"]


@pytest.mark.skipif(not hasattr(builtin, "GetAttrBuiltinVariable"), reason="torch 2.11 knows such strings itself")
def test_elsewhere_tracing_is_as_ever():
    torch._dynamo.reset()
    model, x = Asks("startswith", "weight"), torch.randn(2, 4)
    with class_names():
        torch.compile(model, backend="eager", fullgraph=True)(x)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="startswith"):
        torch.compile(model, backend="eager", fullgraph=True)(x)
