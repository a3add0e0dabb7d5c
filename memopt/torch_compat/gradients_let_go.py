"""Gradients that compiled backward begins with go once it has read them, also where torch would hold them to its end.

Before torch 2.13 autograd holds them in a tuple and a list of its own until backward has returned. Both hold the very
tensor: where nobody else does, backward is given another one of the same memory, and the tensor is left without any.
Whether somebody else holds it (a hook, another node, the caller) is told by how often it is held, beside a gradient
that is known to be held by nobody else. Tried on torch 2.11; torch 2.13 hands gradients over itself.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo import trace_rules
from torch._functorch import aot_autograd as _first  # noqa: F401 (without it the next one is a circle of imports)
from torch._functorch._aot_autograd import runtime_wrappers
from torch.autograd.function import BackwardCFunction

from memopt.torch_compat.backward import COMPILED_NODE
from memopt.torch_compat.dispatch import no_modes

_PROLOGUE = "_backward_prologue_functional"  # puts together what compiled backward is called with
_CALLS = "_memopt_when_run"
_PROBE = "_ProbeBackward"

# How often a gradient is among those of a node, how often it is held in Python, and how often in all.
_Count = tuple[int, int, int]
_lock = threading.Lock()
_apply: Any = None
_use_count: Any = getattr(torch.Tensor, "_use_count", None)


class _Now(threading.local):
    alone: frozenset[int] = frozenset()  # the gradients, by `id`, that only the node which runs has


_now = _Now()


@functools.cache
def can_let_go() -> bool:
    """Whether `let_gradients_go` has them go: torch does not do so itself, and can say how often a tensor is held."""
    boxed, kinds = hasattr(torch.autograd.Function, "boxed_grads_call"), [each.kind for each in _parameters()]
    return not boxed and inspect.Parameter.VAR_POSITIONAL in kinds and _use_count is not None


def lets_gradients_go() -> bool:
    """Whether they go in this process, by `let_gradients_go`."""
    return _apply is not None and BackwardCFunction.apply is _apply


@functools.cache
def let_gradients_go() -> None:
    """Have them go from now on in this process, where torch does not do so itself."""
    global _apply
    if not can_let_go():
        return
    trace_rules.add(__name__)  # Dynamo would trace what is here, and not torch's own, where backward runs in a call
    plain: Any = getattr(runtime_wrappers, _PROLOGUE)
    run: Any = BackwardCFunction.apply
    leading = [each.kind for each in _parameters()].index(inspect.Parameter.VAR_POSITIONAL)

    def prologue(*values: Any) -> Any:
        alone, _now.alone = _now.alone, frozenset()
        if not alone:
            return plain(*values)
        return plain(*values[:leading], *_taken(values[leading:], alone))

    def apply(self: Any, *gradients: Any) -> Any:
        if type(self).__name__ != COMPILED_NODE:
            if _Probe.counts is None and type(self).__name__ == _PROBE:
                _Probe.counts = _counts(gradients)
            return run(self, *gradients)
        before = _now.alone
        _now.alone = frozenset(key for key, count in _counts(gradients).items() if count == _alone(count[0]))
        try:
            found = run(self, *gradients)
        finally:
            _now.alone = before
        for call in vars(self).get(_CALLS, ()):
            call()
        return found

    BackwardCFunction.apply, _apply = apply, apply  # type: ignore[method-assign]
    setattr(runtime_wrappers, _PROLOGUE, prologue)
    _alone(1)


def call_when_run(node: Any, call: Callable[[], None]) -> None:
    """Call `call` whenever this node of compiled code has run; `let_gradients_go` was called before."""
    vars(node).setdefault(_CALLS, []).append(call)


def _parameters() -> list[inspect.Parameter]:
    prologue = getattr(runtime_wrappers, _PROLOGUE, None)
    return [] if prologue is None else list(inspect.signature(prologue).parameters.values())


def _counts(gradients: tuple[Any, ...]) -> dict[int, _Count]:
    """By `id`, of those that are plain tensors."""
    times = Counter(map(id, gradients))
    held = zip(gradients, map(sys.getrefcount, gradients), map(_uses, gradients), strict=True)
    return {id(value): (times[id(value)], count, uses) for value, count, uses in held if type(value) is torch.Tensor}


def _uses(value: Any) -> int:
    return int(_use_count(value)) if type(value) is torch.Tensor else 0


def _held(values: tuple[torch.Tensor]) -> tuple[int, int]:
    """How often the tensor is held, in Python and in all; in a tuple, as a call of Python's may hold arguments."""
    (count,) = map(sys.getrefcount, values)
    return count, _uses(values[0])


def _taken(gradients: tuple[Any, ...], alone: frozenset[int]) -> list[Any]:
    """The gradients; instead of those that nobody else has, tensors of their memory, which they then have no more."""
    fresh: dict[int, torch.Tensor] = {}
    for value in gradients:
        if id(value) not in alone or id(value) in fresh:
            continue
        if value.layout is torch.strided and not value.requires_grad:
            fresh[id(value)] = value.detach()
            shown = value._base
            value.data = value.new_empty(0)
            if shown is not None and _held((shown,)) == _base_alone():
                shown.data = shown.new_empty(0)
    return [fresh.get(id(value), value) for value in gradients]


class _Probe(torch.autograd.Function):
    """A node whose gradients nobody else has; the count of them when it has run."""

    counts: dict[int, _Count] | None = None

    @classmethod
    def found(cls) -> dict[int, _Count]:
        return cls.counts or {}

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, times: int) -> Any:
        return tuple(x.clone() for _ in range(times))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


@functools.cache
def _alone(times: int) -> _Count:
    """The count of a gradient that a node is given so many times, and that nobody else has."""
    with _lock, no_modes(), torch.inference_mode(False), torch.enable_grad():
        _Probe.counts = None
        total, *others = _Probe.apply(torch.zeros(1, requires_grad=True), times)  # type: ignore[no-untyped-call]
        for other in others:
            total = total + other
        del others
        (total * 2).sum().backward()
        (count,) = _Probe.found().values()
    return count


@functools.cache
def _base_alone() -> tuple[int, int]:
    """How often a tensor is held that one view shows, and that nobody else has."""
    with no_modes(), torch.inference_mode(False), torch.no_grad():
        view = torch.zeros(1).view(1, 1)  # holds its base
        shown = view._base
        assert shown is not None
        return _held((shown,))
