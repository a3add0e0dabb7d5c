"""A rewrite may rest on what an operation before its region guarantees: the proof must not forget it."""

from __future__ import annotations

import pytest
import torch

from memopt.pass_manager import Change, Pass, PassError, PassManager, PassResult
from memopt.program import Program
from tests.support import capture

aten = torch.ops.aten


class _DropRelu(Pass):
    """Removes the last relu, right or wrong."""

    name = "drop_relu"
    tolerance = 2.0

    def run(self, program: Program) -> PassResult:
        new = program.copy()
        relu = [node for node in new.graph.nodes if node.target is aten.relu.default][-1]
        relu.replace_all_uses_with(relu.args[0])
        new.graph.erase_node(relu)
        return PassResult(new.finish(), (Change("dropped", (relu.name,), ()),))


class _Chain(torch.nn.Module):
    def __init__(self, first) -> None:
        super().__init__()
        self.first = first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(torch.relu(self.first(x)))


@pytest.mark.parametrize("first", [torch.nn.ReLU6(), torch.exp, lambda x: torch.sigmoid(x).transpose(0, 1).flatten()])
def test_an_idempotent_activation_is_proved_with_the_operations_before_it(first) -> None:
    _, records = PassManager([_DropRelu()]).run(capture(_Chain(first), torch.randn(4, 5)))
    assert records[0].evidence.proved == 1


@pytest.mark.parametrize("first", [torch.nn.LeakyReLU(), torch.tanh, lambda x: torch.tanh(x).transpose(0, 1).flatten()])
def test_dropping_an_activation_that_matters_fails_whatever_comes_before(first) -> None:
    with pytest.raises(PassError, match="drop_relu"):
        PassManager([_DropRelu()]).run(capture(_Chain(first), torch.randn(4, 5)))
