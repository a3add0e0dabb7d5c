"""What a compiled function leaves behind beside its result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from memopt.torch_compat.side_effects import leaves_more_than_its_result

KEPT: Any = None


class Box:
    def __init__(self) -> None:
        self.value: Any = None


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls, self.aux, self.parts = kind, 0, None, [torch.ones(2)]
        self.layer, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> Any:
        global KEPT
        hidden = self.norm(self.layer(x))
        if self.kind == "attribute":
            self.aux = hidden.exp()
        if self.kind == "list":
            self.parts.append(hidden.exp())
        if self.kind == "global":
            KEPT = hidden.exp()
        if self.kind == "count":
            self.calls += 1
        if self.kind == "new":
            box, parts = Box(), []
            box.value = hidden.exp()
            parts.append(hidden.sin())
            return box, parts
        loss = hidden.sum()
        if self.kind == "of a result":
            loss.hidden = hidden
        return loss, hidden


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("", False),
        ("new", False),
        ("count", False),
        ("of a result", True),
        ("attribute", True),
        ("list", True),
        ("global", True),
    ],
)
def test_what_is_left_behind(kind: str, more: bool) -> None:
    found = []

    def backend(graph_module: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append(leaves_more_than_its_result())
        return graph_module.forward

    torch._dynamo.reset()
    torch.compile(Model(kind), backend=backend)(torch.ones(4, 3))
    assert found == [more]


def test_it_is_more_where_dynamo_cannot_be_asked() -> None:
    assert leaves_more_than_its_result()
