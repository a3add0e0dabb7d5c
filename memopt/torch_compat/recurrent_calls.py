"""What stands for calls of recurrent layers while a model is traced: one operator for each layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

from memopt.torch_compat.recurrent_layers import FUNCTIONS, RECURRENT


def _lstm(input: torch.Tensor, hx: Any, *others: Any) -> Any:
    """For `torch.lstm`."""
    return _layered("LSTM", input, hx, *others)


def _gru(input: torch.Tensor, hx: Any, *others: Any) -> Any:
    """For `torch.gru`."""
    return _layered("GRU", input, hx, *others)


def _rnn_tanh(input: torch.Tensor, hx: Any, *others: Any) -> Any:
    """For `torch.rnn_tanh`."""
    return _layered("RNN_TANH", input, hx, *others)


def _rnn_relu(input: torch.Tensor, hx: Any, *others: Any) -> Any:
    """For `torch.rnn_relu`."""
    return _layered("RNN_RELU", input, hx, *others)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # asked as the call is traced
def _transformed() -> bool:
    functorch: Any = torch._C._functorch
    return functorch.maybe_current_level() is not None


def _layered(kind: str, input: torch.Tensor, hx: Any, *others: Any) -> Any:
    if len(others) != 7 or isinstance(others[0], torch.Tensor):
        torch._dynamo.graph_break(msg="a packed sequence: a recurrent layer runs it eagerly")
    if _transformed():
        torch._dynamo.graph_break(msg="a recurrent layer is differentiated by torch.func: it runs eagerly")
    weights, biases, layers, dropout, train, bidirectional, batch_first = others
    drops = dropout > 0 and train and layers > 1
    if input.device.type not in ("cpu", "cuda"):
        torch._dynamo.graph_break(msg=f"a recurrent layer on {input.device.type} runs eagerly")
    x = input.transpose(0, 1) if batch_first else input
    states = list(hx) if kind == "LSTM" else [hx]
    autocast = torch.get_autocast_dtype(input.device.type) if torch.is_autocast_enabled(input.device.type) else None
    # cuDNN overlaps layers of one direction; what it drops between layers could not be drawn once more in backward.
    pieces = 1 if input.device.type == "cuda" and not (drops or bidirectional) else layers
    each, rows = len(weights) // pieces, states[0].size(0) // pieces
    last: list[list[torch.Tensor]] = [[] for _ in states]
    for piece in range(pieces):
        first = [state[piece * rows : (piece + 1) * rows] for state in states] if pieces > 1 else states
        own = list(weights[piece * each : (piece + 1) * each])
        found = RECURRENT(x, first, own, kind, biases, layers // pieces, train, bidirectional, autocast)
        x = found[0]
        for place in range(len(states)):
            last[place].append(found[1 + place])
        if drops and piece < pieces - 1:
            x = functional.dropout(x, dropout, True)
    ends = [torch.cat(found, 0) if pieces > 1 else found[0] for found in last]
    return (x.transpose(0, 1) if batch_first else x, *ends)


RECURRENT_CALLS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    FUNCTIONS["LSTM"]: _lstm,
    FUNCTIONS["GRU"]: _gru,
    FUNCTIONS["RNN_TANH"]: _rnn_tanh,
    FUNCTIONS["RNN_RELU"]: _rnn_relu,
}
