"""What inputs of Dynamo's graphs are to the model, and what a user calls them."""

from __future__ import annotations

import torch
from torch import nn

from memopt.capture.graph_inputs import Known, called, origin_of
from memopt.program import InputKind


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3, bias=False)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, batch):
        return self.inner(batch["x"]) * self.scale


def inputs_of(model, names, *args):
    """Per input of the model's graph its origin, and what it is called."""
    found = []

    def backend(module, example_inputs):
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        for node, value in zip(placeholders, example_inputs, strict=True):
            origin = origin_of(node, value, names)
            found.append((origin.kind, origin.target, called(node, origin)))
        return module.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(*args)
    return sorted(found, key=lambda item: item[2])


def test_inputs_are_named_by_where_the_model_has_them():
    found = inputs_of(Net(), {}, {"x": torch.ones(2, 3)})
    assert found == [
        (InputKind.BUFFER, "scale", "buffer 'scale'"),
        (InputKind.USER, None, "input batch['x']"),
        (InputKind.PARAMETER, "inner.weight", "parameter 'inner.weight'"),
    ]


def test_names_that_are_known_come_first():
    model = Net()
    names = {id(model.scale): Known(InputKind.BUFFER, "shared.scale", model.scale)}
    found = inputs_of(model, names, {"x": torch.ones(2, 3)})
    assert (InputKind.BUFFER, "shared.scale", "buffer 'shared.scale'") in found
