"""What operators take that fake tensors do not show: a recurrent layer's workspace has no size until it runs."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from memopt.memory.ledger import Ledger
from memopt.memory.rounding import allocated_bytes
from memopt.torch_compat import pytree
from memopt.torch_compat.dispatch import as_in_eager, no_modes, no_python_dispatch
from memopt.torch_compat.recurrent_layers import RECURRENT, RECURRENT_BACKWARD, run
from memopt.torch_compat.storages import storage_id

# Operators one of whose results is a workspace that a library sizes, and the place of that among them.
_SAVED = re.compile(r"mkldnn_rnn_layer\.default$|_cudnn_rnn\.default$")
_WORKSPACE = 3
# Their memory is linear in steps and in sequences, but for whole pages: an LSTM of 32 features takes 28 kB for 8 rows
# (a step of one sequence each), 53 for 16, 143 for 64 and 1990 for 1024 (torch 2.13, one core). It is read off two
# runs of no more rows than a part of the layer's own, as planning is to stay within a budget; of fewer than so many,
# pages are most of its memory.
_PART, _FEWEST, _MOST = 4, 128, 256
_SHORT, _SEQUENCES = 32, 16  # a longer layer is run for fewer steps, of so many sequences; else for fewer sequences
_ROUNDING = 32  # size / _ROUNDING is allowed for a workspace's pages


class WholeLedger(Ledger):  # type: ignore[no-untyped-call]
    """A ledger of a step on fake tensors, which allows for the workspaces that libraries size.

    Raises:
        RuntimeError: an operator's workspace is not known.
    """

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operator, and enter the storages of its results."""
        kind = _kind(func) if self.counting else ""
        if kind == "saved":
            return self._recurrent(func, args, dict(kwargs or {}))
        if self.counting and func is RECURRENT:
            return self._layer(args)
        if self.counting and func is RECURRENT_BACKWARD:
            own = 2 * sum(gradient.nbytes for gradient in args[0]) if args[7] == "LSTM" else 0
            self.peak = max(self.peak, self.live + own + _beside(_described(args[5]), args[7]))
        if kind == "backward":
            self.peak = max(self.peak, self.live + self._backward_scratch(args))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _recurrent(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        held, scratch = _workspace(func, _described(args), _described(tuple(kwargs.items())))
        for leaf in pytree.tree_leaves((args, kwargs)):
            self.enter(leaf, counted=False)
        results = func(*args, **kwargs)
        for leaf in pytree.tree_leaves(results):
            hidden = isinstance(leaf, torch.Tensor) and leaf.numel() == 0
            self.enter(leaf, counted=True, more=held if hidden else 0)
        self.peak = max(self.peak, self.live + scratch)
        return results

    def _layer(self, args: tuple[Any, ...]) -> Any:
        """As eager runs it, which saves what it computes within the layer."""
        held, scratch = _saved_by_layer(*_described(args))
        for leaf in pytree.tree_leaves(args):
            self.enter(leaf, counted=False)
        results = RECURRENT(*args)
        self.enter(results[-1], counted=True, more=held)
        for leaf in results[:-1]:
            self.enter(leaf, counted=True)
        self.peak = max(self.peak, self.live + scratch)
        return results

    def _backward_scratch(self, args: tuple[Any, ...]) -> int:
        """About what the operator takes while it runs: its operands twice more, as the library wants them."""
        return 2 * sum(leaf.nbytes for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor))


@functools.cache
def _kind(func: Any) -> str:
    """Whether an operator's workspace is among its results, or it is the backward of one: asked at every call."""
    name = str(func)
    if _SAVED.search(name):
        return "saved"
    return "backward" if "rnn_layer_backward" in name else ""


def _described(values: Any) -> Any:
    """The arguments, with shapes in place of tensors: something that can be looked up."""

    def describe(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return ("tensor", tuple(value.shape), value.dtype, value.device)
        if isinstance(value, (list, tuple)):
            return tuple(map(describe, value))
        return value

    return describe(tuple(values))


def _from_short_runs(length: int, batch: int, taken: Callable[[int, int], int]) -> int:
    """Bytes that a layer takes for so many steps of so many sequences, read off runs of far fewer.

    Args:
        length: of each sequence.
        batch: how many there are.
        taken: the bytes of a run, of steps and of sequences.
    """
    rows = length * batch
    if rows <= _FEWEST:
        return taken(length, batch)
    most = max(_FEWEST, min(_MOST, rows // _PART))
    if length <= _SHORT:
        few = most // length
        runs = (length, few // 2), (length, few)
    else:
        few = min(batch, _SEQUENCES)
        steps = 1 << (most // few).bit_length() - 1  # pages come out even
        runs = (steps // 2, few), (steps, few)
    (less, short), (more, longer) = ((math.prod(run), taken(*run)) for run in runs)
    return int(short + max(0, longer - short) / (more - less) * (rows - less))


@functools.lru_cache(maxsize=256)
def _workspace(func: Any, args: Any, kwargs: Any) -> tuple[int, int]:
    """Bytes of an operator's workspace that backward needs, and about what it takes beyond while it runs."""
    length, batch = args[0][1][:2]
    with no_python_dispatch(), torch.enable_grad():
        held = _from_short_runs(length, batch, lambda steps, few: _run(func, args, kwargs, steps, few))
    held = int(held * (1 + 1 / _ROUNDING))
    return held, held // 2


@functools.lru_cache(maxsize=256)
def _saved_by_layer(input: Any, states: Any, weights: Any, *how: Any) -> tuple[int, int]:
    """Bytes that a recurrent layer's backward needs in eager, and about what its forward takes beyond while it runs."""
    _, (length, batch, _), _, _ = input
    with no_modes():
        held = _from_short_runs(length, batch, lambda steps, few: _saved(steps, few, input, states, weights, how))
    return held, _beside(weights, how[0])


def _beside(weights: Any, kind: str) -> int:
    """About what a layer takes while it runs: oneDNN wants the weights twice more, others' kernels a gradient."""
    sizes: list[int] = [math.prod(shape) * dtype.itemsize for _, shape, dtype, _ in weights]
    return 2 * sum(sizes) if kind == "LSTM" else max(sizes)


def _saved(steps: int, rows: int, input: Any, states: Any, weights: Any, how: Any) -> int:
    """Bytes of the tensors that autograd saves in a layer of so many steps of so many sequences."""

    def made(value: Any, *sizes: int) -> torch.Tensor:
        _, shape, dtype, device = value
        return torch.zeros((*sizes, shape[-1]) if sizes else shape, dtype=dtype, device=device, requires_grad=True)

    x, others = made(input, steps, rows), [made(weight) for weight in weights]
    first = [made(state, state[1][0], rows) for state in states]
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(value: torch.Tensor) -> None:
        saved.setdefault(storage_id(value), value.untyped_storage())

    with as_in_eager(gradients=True), torch.autograd.graph.saved_tensors_hooks(pack, lambda _: x):
        results = run(x, first, others, *how)
    there = {storage_id(value) for value in (x, *first, *others, *results)}
    return sum(allocated_bytes(held.nbytes(), x.device) for key, held in saved.items() if key not in there)


def _run(func: Any, args: Any, kwargs: Any, steps: int, few: int) -> int:
    """Bytes of the workspace of a run of so many steps of so many sequences."""
    batch = args[0][1][1]

    def made(value: Any, first: bool = False) -> Any:
        if isinstance(value, tuple) and value[:1] == ("tensor",):
            _, shape, dtype, device = value
            if first:
                shape = (steps, few, *shape[2:])
            elif len(shape) == 3 and shape[1] == batch:  # states
                shape = (shape[0], few, shape[2])
            return torch.zeros(shape, dtype=dtype, device=device)
        return [made(item) for item in value] if isinstance(value, tuple) else value

    given = [made(value, index == 0) for index, value in enumerate(args)]
    results = func(*given, **{name: made(value) for name, value in kwargs})
    return int(results[_WORKSPACE].untyped_storage().nbytes())
