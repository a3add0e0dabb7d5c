"""Modules whose calls are recomputed in backward, as PyTorch itself runs them: `torch.utils.checkpoint` around them.

What a module was when it ran forward it is when it is recomputed: its parameters, buffers, attributes and switches, the
settings of torch that choose kernels, and the random numbers. What the recomputation writes to buffers and attributes
goes nowhere: forward has written it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memopt.common.kernel_settings import kernel_settings, set_kernel_settings
from memopt.common.random_streams import RandomStreams
from memopt.step.backward_entry import Stamp
from memopt.torch_compat import pytree
from memopt.torch_compat.fake_tensors import FakeTensor
from memopt.torch_compat.storages import version_of

_PARTS = ("_parameters", "_buffers", "_modules")
_LOOKS = 3  # calls on a GPU whose weights are compared, and not only asked whether they were written to


@dataclasses.dataclass(frozen=True)
class ModuleCall:
    """One of the calls of a module within a call of the model.

    Attributes:
        name: of the module, as the user calls it; empty for the model itself.
        index: of the call among those of this module.
        draws: whether it draws random numbers.
        writes: names of the buffers that it writes to, as the module calls them.
    """

    name: str
    index: int
    draws: bool = False
    writes: tuple[str, ...] = ()


class ModuleCheckpoints:
    """Calls of modules that are checkpointed.

    Attributes:
        calls: which.
        last: the one that was recomputed last; None before.
    """

    def __init__(self, calls: Iterable[ModuleCall]) -> None:
        """None is recomputed yet."""
        self.calls = tuple(calls)
        self.last: ModuleCall | None = None
        self._calls = {(call.name, call.index): call for call in self.calls}
        self._left = _LOOKS * len(self.calls)

    @contextlib.contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Within: the model's call checkpoints them, where gradients are wanted."""
        modules, counts = dict(model.named_modules()), collections.Counter[str]()
        own = [(name, modules[name]) for name in dict.fromkeys(call.name for call in self.calls) if name in modules]
        before = [(module, module.__dict__.get("forward")) for _, module in own]
        for name, module in own:
            module.__dict__["forward"] = _Forward(self, name, module, module.forward, counts)
        try:
            yield
        finally:
            for module, forward in before:
                if forward is None:
                    module.__dict__.pop("forward", None)
                else:
                    module.__dict__["forward"] = forward

    def run(self, name: str, index: int, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a module's forward."""
        call = self._calls.get((name, index))
        if call is None or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        self._left -= 1
        state = _State(call, module, (args, kwargs), contents=self._left >= 0)
        runs = 0

        def once(args: Any, kwargs: Any) -> Any:
            nonlocal runs
            runs += 1
            if runs == 1:
                return forward(*args, **kwargs)
            self.last = call
            with state.in_force():
                return forward(*args, **kwargs)

        return checkpoint(once, args, kwargs, use_reentrant=False, preserve_rng_state=False)


@dataclasses.dataclass
class _Forward:
    """In place of a module's forward."""

    checkpoints: ModuleCheckpoints
    name: str
    module: nn.Module
    forward: Callable[..., Any]
    counts: collections.Counter[str]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        index = self.counts[self.name]
        self.counts[self.name] += 1
        return self.checkpoints.run(self.name, index, self.module, self.forward, args, kwargs)


class _State:
    """What a module and torch's settings are when its forward begins."""

    def __init__(self, call: ModuleCall, module: nn.Module, inputs: Any, *, contents: bool) -> None:
        self._attributes = [(part, _attributes(part)) for part in module.modules()]
        buffers = dict(module.named_buffers())
        written = {id(buffers[name]): buffers[name].detach().clone() for name in call.writes if name in buffers}
        self._buffers = [
            (index, name, written[id(buffer)])
            for index, (part, _) in enumerate(self._attributes)
            for name, buffer in part.named_buffers(recurse=False, remove_duplicate=False)
            if id(buffer) in written
        ]
        self._trained = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
        where = f" of {call.name}" if call.name else ""
        shown: list[tuple[torch.Tensor, str]] = []
        shown += [(value, f"parameter {name!r}{where}") for name, value in module.named_parameters()]
        shown += [(value, f"buffer {name!r}{where}") for name, value in buffers.items() if id(value) not in written]
        given = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
        shown += [
            (value, f"input {place} of {call.name or type(module).__name__}") for place, value in enumerate(given)
        ]
        self._stamps = [Stamp(value, name, contents) for value, name in shown]
        self._fakes = [(value, version_of(value), name) for value, name in shown if isinstance(value, FakeTensor)]
        self._settings = kernel_settings()
        self._streams = None
        if call.draws and not self._fakes:
            devices = sorted({value.device.index for value, _ in shown if value.is_cuda})
            self._streams = functools.partial(RandomStreams, devices)
        self._drawn = self._streams() if self._streams is not None else None

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Within: all is as it was.

        Raises:
            RuntimeError: a tensor that it reads was written to.
        """
        with torch.no_grad():
            for stamp in self._stamps:
                stamp.check()
        for value, version, name in self._fakes:
            if version_of(value) != version:
                raise RuntimeError(f"{name} is written to before it is recomputed from")
        settings, streams = kernel_settings(), None if self._streams is None else self._streams()
        now = [dict(vars(part)) for part, _ in self._attributes]
        trained = [parameter.requires_grad for parameter, _ in self._trained]
        then = [_copied(attributes) for _, attributes in self._attributes]
        for index, name, buffer in self._buffers:
            then[index]["_buffers"][name] = buffer.clone()
        try:
            if self._drawn is not None:
                self._drawn.restore()
            set_kernel_settings(self._settings)
            self._set([part for part, _ in self._attributes], then, [wanted for _, wanted in self._trained])
            yield
        finally:
            self._set([part for part, _ in self._attributes], now, trained)
            set_kernel_settings(settings)
            if streams is not None:
                streams.restore()

    def _set(self, parts: list[nn.Module], attributes: list[dict[str, Any]], trained: list[bool]) -> None:
        for part, values in zip(parts, attributes, strict=True):
            vars(part).clear()
            vars(part).update(values)
        for (parameter, _), wanted in zip(self._trained, trained, strict=True):
            if parameter.requires_grad != wanted and parameter.is_leaf:
                parameter.requires_grad_(wanted)


def _attributes(module: nn.Module) -> dict[str, Any]:
    found = _copied(vars(module))
    forward = found.get("forward")
    if isinstance(forward, _Forward):
        del found["forward"]
        if getattr(forward.forward, "__func__", None) is not type(module).forward:  # set by hand
            found["forward"] = forward.forward
    return found


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: value.copy() if name in _PARTS else value for name, value in attributes.items()}
