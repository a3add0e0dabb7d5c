"""What operators take that fake tensors do not show: a recurrent layer's workspace has no size until it runs."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
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
# Two lengths of a short run of them; beyond these its memory is linear in the length, but for rounding. Below it is
# not: an LSTM of 32 features takes 28 kB for 3 steps and 143 kB for 64 (torch 2.13, one core).
_SHORT, _LONGER = 32, 64
_ROUNDING = 32  # one part in so many is allowed for that
_FEW = 16  # sequences of such a run, of layers whose memory is linear in their number


class WholeLedger(Ledger):  # type: ignore[no-untyped-call]
    """A ledger of a step on fake tensors, which allows for the workspaces that libraries size.

    Raises:
        RuntimeError: an operator's workspace is not known.
    """

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operator, and enter the storages of its results."""
        if self.counting and _SAVED.search(str(func)):
            return self._recurrent(func, args, dict(kwargs or {}))
        if self.counting and func is RECURRENT:
            return self._layer(args)
        if self.counting and func is RECURRENT_BACKWARD:
            own = 2 * sum(gradient.nbytes for gradient in args[0]) if args[7] == "LSTM" else 0
            self.peak = max(self.peak, self.live + own + _beside(_described(args[5]), args[7]))
        if self.counting and "rnn_layer_backward" in str(func):
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


def _described(values: Any) -> Any:
    """The arguments, with shapes in place of tensors: something that can be looked up."""

    def describe(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return ("tensor", tuple(value.shape), value.dtype, value.device)
        if isinstance(value, (list, tuple)):
            return tuple(map(describe, value))
        return value

    return describe(tuple(values))


@functools.lru_cache(maxsize=256)
def _workspace(func: Any, args: Any, kwargs: Any) -> tuple[int, int]:
    """Bytes of an operator's workspace that backward needs, and about what it takes beyond while it runs."""
    length = args[0][1][0]
    with no_python_dispatch(), torch.enable_grad():
        if length <= _LONGER:
            held = int(_run(func, args, kwargs, length) * (1 + 1 / _ROUNDING))
            return held, held // 2
        short, longer = (_run(func, args, kwargs, steps) for steps in (_SHORT, _LONGER))
    slope = max(0, longer - short) / (_LONGER - _SHORT)
    held = short + slope * (length - _SHORT)
    held = max(held, 0) * (1 + 1 / _ROUNDING)
    return int(held), int(held / 2)


@functools.lru_cache(maxsize=256)
def _saved_by_layer(input: Any, states: Any, weights: Any, *how: Any) -> tuple[int, int]:
    """Bytes that a recurrent layer's backward needs in eager, and about what its forward takes beyond while it runs."""
    _, (length, batch, _), _, _ = input
    rows = min(batch, _FEW)
    with no_modes():
        if length <= _LONGER and batch <= _FEW:
            held = _saved(length, batch, input, states, weights, how)
        else:
            short, longer = (_saved(steps, rows, input, states, weights, how) for steps in (_SHORT, _LONGER))
            slope = max(0, longer - short) / ((_LONGER - _SHORT) * rows)
            held = max(0, int(short + slope * (length * batch - _SHORT * rows)))
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


def _run(func: Any, args: Any, kwargs: Any, steps: int) -> int:
    """Bytes of the workspace of a short run."""

    def made(value: Any, first: bool = False) -> Any:
        if isinstance(value, tuple) and value[:1] == ("tensor",):
            _, shape, dtype, device = value
            return torch.zeros((steps, *shape[1:]) if first else shape, dtype=dtype, device=device)
        return [made(item) for item in value] if isinstance(value, tuple) else value

    given = [made(value, index == 0) for index, value in enumerate(args)]
    results = func(*given, **{name: made(value) for name, value in kwargs})
    return int(results[_WORKSPACE].untyped_storage().nbytes())
