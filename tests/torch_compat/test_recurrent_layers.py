"""Recurrent layers as operators: eager's numbers, in one piece bit by bit, and what fake tensors say of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call

from memopt.torch_compat.recurrent_layers import RECURRENT
from memopt.torch_compat.storages import storage_id

KINDS = {
    "LSTM": (nn.LSTM, {}),
    "projected": (nn.LSTM, {"proj_size": 3}),
    "GRU": (nn.GRU, {}),
    "RNN_TANH": (nn.RNN, {}),
    "RNN_RELU": (nn.RNN, {"nonlinearity": "relu"}),
}
HALF = torch.bfloat16

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections")  # eager says so, too


def layer(name, *, bidirectional, bias=True, layers=1):
    torch.manual_seed(0)
    kind, options = KINDS[name]
    module = kind(4, 6, layers, bidirectional=bidirectional, bias=bias, **options)
    x = torch.randn(7, 3, 4, requires_grad=True)
    rows = layers * (1 + bidirectional)
    widths = [options.get("proj_size", 6), 6] if kind is nn.LSTM else [6]
    return module, x, [torch.randn(rows, 3, width, requires_grad=True) for width in widths]


def eager(module, x, states, autocast):
    with torch.autocast("cpu", HALF, enabled=autocast is not None):
        output, last = module(x, tuple(states) if isinstance(module, nn.LSTM) else states[0])
    return [output, *(last if isinstance(module, nn.LSTM) else [last])]


def operator(module, x, states, autocast, pieces):
    found = RECURRENT(
        x, states, list(module.parameters()), module.mode, module.bias, module.num_layers, True,
        module.bidirectional, autocast, pieces,
    )  # fmt: skip
    return found[: 1 + len(states)]


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("autocast", [None, HALF], ids=str)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_results_and_gradients_are_eagers(name, bidirectional, autocast, pieces):
    module, x, states = layer(name, bidirectional=bidirectional, bias=not bidirectional)
    leaves = [x, *states, *module.parameters()]
    expected, found = eager(module, x, states, autocast), operator(module, x, states, autocast, pieces)
    assert [value.dtype for value in found] == [value.dtype for value in expected]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    tolerance = {"rtol": 0, "atol": 0} if pieces == 1 else {"rtol": 0.1, "atol": 0.1} if autocast else {}
    for places in ([0], [1], range(len(found))):  # some results alone, and all
        tangents = [torch.randn_like(found[place]) for place in places]
        gradients = [
            torch.autograd.grad([of[place] for place in places], leaves, tangents, retain_graph=True, allow_unused=True)
            for of in (expected, found)
        ]
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(torch.zeros_like(b) if a is None else a, b, **tolerance)
        assert len({storage_id(gradient) for gradient in gradients[1]}) == len(leaves)


def test_several_layers_of_one_direction_may_run_in_pieces_and_those_of_two_may_not():
    module, x, states = layer("GRU", bidirectional=False, layers=2)
    found = operator(module, x, states, None, 2)
    torch.testing.assert_close(found, eager(module, x, states, None))
    module, x, states = layer("GRU", bidirectional=True, layers=2)
    torch.testing.assert_close(operator(module, x, states, None, 1), eager(module, x, states, None))
    with pytest.raises(ValueError, match="two directions do not run piece by piece"):
        operator(module, x, states, None, 2)


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("name", ["projected", "GRU"])
def test_the_operators_are_what_torch_wants_of_one(name, pieces):
    module, x, states = layer(name, bidirectional=True)
    torch.library.opcheck(
        RECURRENT,
        (x, states, list(module.parameters()), module.mode, True, 1, True, True, None, pieces),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_gradients_are_those_of_weights_in_use():
    """What is not trained has no gradient, and costs none."""
    module, x, states = layer("LSTM", bidirectional=False)
    module.weight_hh_l0.requires_grad_(False)
    operator(module, x.detach(), [state.detach() for state in states], None, 1)[0].sum().backward()
    assert module.weight_hh_l0.grad is None and x.grad is None
    own = module.weight_ih_l0.grad.clone()
    module.zero_grad()
    functional_call(module, dict(module.named_parameters()), (x.detach(), tuple(states)))[0].sum().backward()
    assert torch.equal(own, module.weight_ih_l0.grad)
