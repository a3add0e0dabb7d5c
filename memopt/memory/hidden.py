"""What operators take that fake tensors do not show: a recurrent layer's workspace has no size until it runs."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from memopt.memory.ledger import Ledger
from memopt.torch_compat import pytree
from memopt.torch_compat.dispatch import no_python_dispatch

# Operators one of whose results is a workspace that a library sizes, and the place of that among them.
_SAVED = re.compile(r"mkldnn_rnn_layer\.default$|_cudnn_rnn\.default$")
_WORKSPACE = 3
# Two lengths of a short run of them; beyond these its memory is linear in the length, but for rounding. Below it is
# not: an LSTM of 32 features takes 28 kB for 3 steps and 143 kB for 64 (torch 2.13, one core).
_SHORT, _LONGER = 32, 64
_ROUNDING = 32  # one part in so many is allowed for that


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
