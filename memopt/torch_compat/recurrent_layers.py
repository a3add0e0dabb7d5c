"""Layers of recurrent networks as operators of a graph: torch's own kernels, whatever the length of the sequence.

Forward saves its operands alone. Backward runs the layer once more and lets autograd follow it there, so that gradients
are eager's; what autograd saves meanwhile is memory that the operator takes while it runs. Tried on torch 2.13.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memopt.torch_compat.dispatch import as_in_eager, no_modes
from memopt.torch_compat.storages import storage_id

_LIBRARY = torch.library.Library("memopt", "FRAGMENT")  # type: ignore[no-untyped-call]
_HOW = "str kind, bool biases, int layers, bool train, bool bidirectional, ScalarType? autocast, int pieces=1"
for _schema in (
    f"recurrent(Tensor input, Tensor[] states, Tensor[] weights, {_HOW}) -> Tensor[]",
    "recurrent_backward(Tensor[] gradients, int[] places, Tensor[] kept, Tensor input, Tensor[] states,"
    f" Tensor[] weights, bool[] wanted, {_HOW}) -> Tensor[]",
):
    _LIBRARY.define(_schema)  # type: ignore[no-untyped-call]

# Of an input (length, batch, features), with states of (layers x directions, batch, width): the output (length, batch,
# directions x width); the last states; states (pieces - 1, ...) between pieces of the sequence, for backward to go on
# from. With one piece these are empty, and live as long as what eager would have saved.
RECURRENT = torch.ops.memopt.recurrent.default
RECURRENT_BACKWARD = torch.ops.memopt.recurrent_backward.default

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "LSTM": torch.lstm,
    "GRU": torch.gru,
    "RNN_TANH": torch.rnn_tanh,
    "RNN_RELU": torch.rnn_relu,
}


def run(
    input: torch.Tensor,
    states: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    kind: str,
    biases: bool,
    layers: int,
    train: bool,
    bidirectional: bool,
    autocast: torch.dtype | None,
) -> tuple[torch.Tensor, ...]:
    """The output and the last states of layers without dropout between them, as torch computes them in eager.

    Args:
        input: (length, batch, features).
        states: the first ones, (layers x directions, batch, width) each: of an LSTM the hidden and the cell's.
        weights: as `nn.RNNBase` lists them.
        kind: of `FUNCTIONS`.
        biases: whether there are any among the weights.
        layers: how many.
        train: whether the module is training.
        bidirectional: whether there are two directions.
        autocast: the dtype of autocast; None: it is off.
    """
    given = list(states) if kind == "LSTM" else states[0]
    half = autocast if autocast in (torch.bfloat16, torch.float16) else None  # else it is a run in float64, to compare
    with torch.autocast(input.device.type, dtype=half or torch.bfloat16, enabled=half is not None):
        found = FUNCTIONS[kind](input, given, list(weights), biases, layers, 0.0, train, bidirectional, False)
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class _Direction:
    """What of a layer runs together.

    Attributes:
        place: among the layer's directions.
        rows, weights: where its states and its weights are among those of all.
        backwards: whether it goes from the end of the sequence to its begin.
        bidirectional: whether it is both directions at once, in one piece.
    """

    place: int
    rows: slice
    weights: slice
    backwards: bool
    bidirectional: bool

    def turned(self, values: torch.Tensor) -> torch.Tensor:
        """The values in the order of the sequence that the layer goes by, or back."""
        return values.flip(0) if self.backwards else values


def _directions(weights: int, layers: int, bidirectional: bool, pieces: int) -> list[_Direction]:
    """Those that run one after the other.

    Raises:
        ValueError: pieces of several layers with two directions, of which the next needs the whole sequence.
    """
    if not bidirectional or pieces == 1:
        return [_Direction(0, slice(None), slice(None), False, bidirectional)]
    if layers > 1:
        raise ValueError("layers of two directions do not run piece by piece together")
    each = weights // 2
    return [_Direction(d, slice(d, d + 1), slice(d * each, (d + 1) * each), d == 1, False) for d in range(2)]


def _bounds(length: int, pieces: int, backwards: bool) -> list[slice]:
    """The pieces of a sequence, in the order in which they run."""
    found = [slice(length * piece // pieces, length * (piece + 1) // pieces) for piece in range(pieces)]
    return found[::-1] if backwards else found


def _forward(
    input: torch.Tensor,
    states: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    kind: str,
    biases: bool,
    layers: int,
    train: bool,
    bidirectional: bool,
    autocast: torch.dtype | None,
    pieces: int = 1,
) -> list[torch.Tensor]:
    # Autocast casts a weight once where it is a leaf that requires a gradient, else at each step of the sequence.
    leaves = [weight.detach().requires_grad_() for weight in weights]
    how = kind, biases, layers, train, bidirectional, autocast
    if pieces == 1:
        with as_in_eager(gradients=False):
            found = run(input, states, leaves, *how)
        return [*_own(found, (input, *states, *weights)), *(end.new_empty(0, *end.shape) for end in found[1:])]
    output, *others = _shaped(input, states, weights, *how, pieces)
    last, kept = others[: len(states)], others[len(states) :]
    width = states[0].shape[-1]
    for direction in _directions(len(weights), layers, bidirectional, pieces):
        now = [state[direction.rows] for state in states]
        for number, part in enumerate(_bounds(input.shape[0], pieces, direction.backwards)):
            with as_in_eager(gradients=False):
                given = direction.turned(input[part])
                own = leaves[direction.weights]
                found = run(given, now, own, kind, biases, layers, train, direction.bidirectional, autocast)
            columns = (
                slice(None) if not bidirectional else slice(direction.place * width, (direction.place + 1) * width)
            )
            output[part, :, columns] = direction.turned(found[0])
            now = list(found[1:])
            for place, state in enumerate(now):
                if number < pieces - 1:
                    kept[place][number, direction.rows] = state
                else:
                    last[place][direction.rows] = state
    return [output, *last, *kept]


def _backward(
    gradients: Sequence[torch.Tensor],
    places: Sequence[int],
    kept: Sequence[torch.Tensor],
    input: torch.Tensor,
    states: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    wanted: Sequence[bool],
    kind: str,
    biases: bool,
    layers: int,
    train: bool,
    bidirectional: bool,
    autocast: torch.dtype | None,
    pieces: int = 1,
) -> list[torch.Tensor]:
    of = dict(zip(places, gradients, strict=True))
    width, count = states[0].shape[-1], len(states)
    made = _Sums([input, *states, *weights], wanted)
    for direction in _directions(len(weights), layers, bidirectional, pieces):
        later = [of[place][direction.rows] if place in of else None for place in range(1, 1 + count)]
        columns = slice(direction.place * width, (direction.place + 1) * width) if pieces > 1 else slice(None)
        parts = _bounds(input.shape[0], pieces, direction.backwards)
        for number in reversed(range(pieces)):
            part = parts[number]
            whole = direction.turned(of[0][part, :, columns]) if 0 in of else None
            before = [between[number - 1] for between in kept] if number else states
            given = [direction.turned(input[part]), *(state[direction.rows] for state in before)]
            own = list(weights[direction.weights])
            needs = [wanted[0], *(number > 0 or needed for needed in wanted[1 : 1 + count])]
            needs += wanted[1 + count :][direction.weights]
            got = _gradients(
                [*given, *own],
                needs,
                [whole, *later],
                count,
                (kind, biases, layers, train, direction.bidirectional, autocast),
            )
            earlier = got[1 : 1 + count]
            if got[0] is not None:
                made.add(0, direction.turned(got[0]), part)
            if number == 0:
                for place, gradient in enumerate(earlier):
                    made.add(1 + place, gradient, direction.rows)
            later = earlier
            first = range(len(weights))[direction.weights].start
            for place, gradient in enumerate(got[1 + count :]):
                made.add(1 + count + first + place, gradient)
    return _own(made.whole(), (*gradients, input, *states, *weights))


class _Sums:
    """Gradients that come in pieces."""

    def __init__(self, of: Sequence[torch.Tensor], wanted: Sequence[bool]) -> None:
        self._of, self._wanted = of, wanted
        self._found: dict[int, torch.Tensor] = {}

    def add(self, place: int, gradient: torch.Tensor | None, part: slice = slice(None)) -> None:
        """Add what a piece gives, of some rows or of all."""
        if gradient is None or not self._wanted[place]:
            return
        if place not in self._found and gradient.shape == self._of[place].shape:
            self._found[place] = gradient
            return
        if place not in self._found:
            self._found[place] = torch.zeros_like(self._of[place], memory_format=torch.contiguous_format)
        self._found[place][part] += gradient

    def whole(self) -> list[torch.Tensor]:
        """Those that are wanted."""
        return [
            self._found[place] if place in self._found else torch.zeros_like(value)
            for place, value in enumerate(self._of)
            if self._wanted[place]
        ]


def _gradients(
    given: Sequence[torch.Tensor],
    needs: Sequence[bool],
    of: Sequence[torch.Tensor | None],
    states: int,
    how: tuple[Any, ...],
) -> list[torch.Tensor | None]:
    """The gradients of what a layer is given, by autograd, from those of its output and of its last states."""
    with as_in_eager(gradients=True):
        leaves = [value.detach().requires_grad_(needed) for value, needed in zip(given, needs, strict=True)]
        found = run(leaves[0], leaves[1 : 1 + states], leaves[1 + states :], *how)
        roots = [(root, gradient) for root, gradient in zip(found, of, strict=True) if gradient is not None]
        del found
        roots = [(root, gradient) for root, gradient in roots if root.requires_grad]
        trained = [leaf for leaf in leaves if leaf.requires_grad]
        if not roots or not trained:
            return [None] * len(given)
        got = torch.autograd.grad(
            [root for root, _ in roots], trained, [gradient for _, gradient in roots], allow_unused=True
        )
    known = iter(got)
    return [next(known) if needed else None for needed in needs]


def _own(values: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The values, contiguous, each in memory of its own: torch has one gradient for both biases."""
    seen, found = {storage_id(other) for other in others}, []
    for value in values:
        plain = value.detach().contiguous()
        plain = plain.clone() if storage_id(plain) in seen else plain
        seen.add(storage_id(plain))
        found.append(plain)
    return found


def _shaped(
    input: torch.Tensor,
    states: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    kind: str,
    biases: bool,
    layers: int,
    train: bool,
    bidirectional: bool,
    autocast: torch.dtype | None,
    pieces: int = 1,
) -> list[torch.Tensor]:
    how = kind, biases, layers, train, bidirectional, autocast
    given = (tuple(value.dtype for value in values) for values in (states, weights))
    projected = states[0].shape[-1] != states[-1].shape[-1]
    dtypes = _dtypes(input.dtype, *given, projected, input.device, how)
    width = states[0].shape[-1] * (2 if bidirectional else 1)
    ends = [input.new_empty(state.shape, dtype=dtype) for state, dtype in zip(states, dtypes[1:], strict=True)]
    between = [end.new_empty((pieces - 1, *end.shape)) for end in ends]
    return [input.new_empty((input.shape[0], input.shape[1], width), dtype=dtypes[0]), *ends, *between]


def _shaped_gradients(
    gradients: Sequence[torch.Tensor],
    places: Sequence[int],
    kept: Sequence[torch.Tensor],
    input: torch.Tensor,
    states: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    wanted: Sequence[bool],
    *how: Any,
) -> list[torch.Tensor]:
    given = (input, *states, *weights)
    return [value.new_empty(value.shape) for value, needed in zip(given, wanted, strict=True) if needed]


@functools.lru_cache(maxsize=256)
def _dtypes(
    input: torch.dtype,
    states: tuple[torch.dtype, ...],
    weights: tuple[torch.dtype, ...],
    projected: bool,
    device: torch.device,
    how: tuple[Any, ...],
) -> tuple[torch.dtype, ...]:
    """The dtypes of the output and of the last states: autocast changes an operator within a layer, and not another.

    Seen in a run of one step of layers as narrow as can be.
    """
    kind, biases, layers, _, bidirectional, autocast = how
    if autocast is None and {*states, *weights} == {input}:
        return (input, *states)
    gates, directions = {"LSTM": 4, "GRU": 3}.get(kind, 1), 2 if bidirectional else 1
    width, out = (2, 1) if projected else (1, 1)
    rows = gates * width
    shapes: list[tuple[int, ...]] = []
    for layer in range(layers):
        own = [(rows, out * directions if layer else 1), (rows, out), *([(rows,), (rows,)] if biases else [])]
        shapes += (own + [(out, width)] * projected) * directions
    with no_modes(), as_in_eager(gradients=False):
        made = [torch.zeros(size, dtype=dtype, device=device) for size, dtype in zip(shapes, weights, strict=True)]
        sizes = [(layers * directions, 1, end) for end in (out, width)]
        first = [torch.zeros(size, dtype=dtype, device=device) for size, dtype in zip(sizes, states, strict=False)]
        found = run(torch.zeros(1, 1, 1, dtype=input, device=device), first, made, *how)
    return tuple(value.dtype for value in found)


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    input, states, weights, *how = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1 + len(states) :], *states, input, *weights)
    ctx.states, ctx.how = len(states), how


def _derive(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    count, saved = ctx.states, ctx.saved_tensors
    kept, states, input, weights = saved[:count], saved[count : 2 * count], saved[2 * count], saved[2 * count + 1 :]
    of_input, of_states, of_weights, *others = ctx.needs_input_grad
    wanted = [of_input, *of_states, *of_weights]
    places = [place for place, gradient in enumerate(gradients[: 1 + count]) if gradient is not None]
    given = [gradients[place] for place in places]
    found = iter(RECURRENT_BACKWARD(given, places, kept, input, states, weights, wanted, *ctx.how))
    all_of = [next(found) if needed else None for needed in wanted]
    return (all_of[0], all_of[1 : 1 + count], all_of[1 + count :], *(None for _ in others))


for _name, _kernel, _fake in (
    ("recurrent", _forward, _shaped),
    ("recurrent_backward", _backward, _shaped_gradients),
):
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"memopt::{_name}", _fake, lib=_LIBRARY)
torch.library.register_autograd("memopt::recurrent", _derive, setup_context=_save, lib=_LIBRARY)
