"""A copy of an optimizer whose parameters and state are fake tensors, to be stepped apart from the real one."""

from __future__ import annotations

import collections
import enum
import functools
import types
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from memopt.memory.reach import is_sparse, optimizers_in, plain_tensors
from memopt.torch_compat.dispatch import no_modes
from memopt.torch_compat.optimizers import fakes_without_address


class CannotCount(Exception):
    """An optimizer whose copy would not be apart from the real one, or whose step is more than its own."""


class Twins:
    """Fake tensors that stand for real ones: one per tensor, with a gradient where the real one will have one."""

    def __init__(self, trained: Mapping[int, torch.Tensor], target: torch.device | None) -> None:
        """Make those of the parameters that have gradients, by `id`, as if on `target`; None: where they are."""
        self.mode = fakes_without_address()
        self.target = target
        self.trained = trained
        self.twins: dict[int, nn.Parameter] = {}
        self.own: set[int] = set()
        with self.mode:
            for parameter in trained.values():
                self(parameter)

    def all(self) -> list[nn.Parameter]:
        """The twins of the parameters that have gradients."""
        return [self.twins[key] for key in self.trained]

    def __call__(self, parameter: torch.Tensor) -> torch.Tensor:
        """The twin of a parameter; a twin is its own."""
        if id(parameter) in self.own:
            return parameter
        if id(parameter) not in self.twins:
            with no_modes():  # of a sparse one they are asked by operators
                parts = list(plain_tensors(parameter))
            # Of one that is shared out, the part that is here; of a sparse one its values.
            like = parts[-1] if len(parts) == 1 or is_sparse(parameter) else parameter
            twin = nn.Parameter(self._empty(like), requires_grad=parameter.requires_grad)
            if id(parameter) in self.trained:
                twin.grad = self._empty(like)
            self.twins[id(parameter)] = twin
            self.own.add(id(twin))
        return self.twins[id(parameter)]

    def has_gradient(self, parameter: torch.Tensor) -> bool:
        """Whether the step will find a gradient of this parameter, or of what this is the twin of."""
        return id(parameter) in self.trained or id(parameter) in self.own

    def made(self, optimizer: Any) -> bool:
        """Whether the optimizer holds fake parameters already."""
        return all(id(p) in self.own for group in optimizer.param_groups for p in group["params"])

    def copy(self, optimizer: Any, uncounted: Callable[[], AbstractContextManager[None]]) -> Any:
        """A copy whose parameters, state and other tensors are fake, with copies of the optimizers that it wraps.

        Args:
            optimizer: the real one, which is only read.
            uncounted: within what it returns tensors are made that are no state.

        Raises:
            CannotCount: something real would take part in the copy's step.
        """
        groups = [group for item in (optimizer, *optimizers_in(optimizer)) for group in item.param_groups]
        held = {id(p): p for group in groups for p in group["params"]}
        with uncounted():
            for parameter in held.values():
                self(parameter)
        return _Copy(self, held, uncounted)(optimizer)

    def of_state(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor for one that is no parameter; the value of a single number on the CPU stays known."""
        if hasattr(tensor, "__tensor_flatten__") and type(tensor) is not torch.Tensor and id(tensor) not in self.own:
            names, context = tensor.__tensor_flatten__()
            inner = {name: self.of_state(getattr(tensor, name)) for name in names}
            kind: Any = type(tensor)
            return kind.__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())  # type: ignore[no-any-return]
        if tensor.ndim == 0 and tensor.device.type == "cpu":
            return torch.tensor(_number(tensor), dtype=tensor.dtype)  # a step count or rate
        return self._empty(tensor)

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=self.target or like.device)


class _Copy:
    """Copies values deeply; what was copied once is the same object in every place."""

    def __init__(
        self, twins: Twins, held: Mapping[int, torch.Tensor], uncounted: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._twins, self._held, self._uncounted = twins, held, uncounted
        self._known: dict[int, tuple[Any, Any]] = {}  # with the original, whose id stays its own

    def __call__(self, value: Any) -> Any:
        if id(value) in self._known:
            return self._known[id(value)][1]
        if isinstance(value, torch.Tensor):
            known = id(value) in self._held or id(value) in self._twins.own
            return self._keep(value, self._twins(value) if known else self._twins.of_state(value))
        if isinstance(value, (list, set, dict)):
            return self._container(value)
        if isinstance(value, (tuple, frozenset)):
            items = [self(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, functools.partial):
            return functools.partial(self(value.func), *self(value.args), **self(value.keywords))
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self(value.__self__))
        if isinstance(value, types.FunctionType):
            if optimizers_in(value):
                raise CannotCount("steps what a function closes over")
            return value
        if torch.distributed.is_available() and isinstance(value, torch.distributed.ProcessGroup):
            raise CannotCount("talks to other processes in its step")
        if isinstance(value, (type, types.ModuleType, nn.Module, enum.Enum)) or not _is_plain(value):
            if optimizers_in(value):
                raise CannotCount("steps what cannot be copied")
            return value
        return self._object(value)

    def _keep(self, value: Any, copied: Any) -> Any:
        self._known[id(value)] = value, copied
        return copied

    def _container(self, value: Any) -> Any:
        if isinstance(value, collections.defaultdict):
            copied: Any = type(value)(self(value.default_factory))
        else:
            kind: Any = type(value)
            copied = kind.__new__(kind)
        self._keep(value, copied)
        if isinstance(value, dict):
            copied.update((self(key), self(item)) for key, item in value.items())
        elif isinstance(value, list):
            copied.extend(map(self, value))
        else:
            copied.update(map(self, value))
        return copied

    def _object(self, value: Any) -> Any:
        copied = self._keep(value, object.__new__(type(value)))
        is_optimizer = isinstance(value, torch.optim.Optimizer)
        for name, item in value.__dict__.items():
            if is_optimizer and name == "step":  # a learning-rate scheduler binds the real optimizer's step
                continue
            if is_optimizer and name.endswith("_hooks"):
                copied.__dict__[name] = collections.OrderedDict()
            elif is_optimizer and name in ("param_groups", "defaults"):
                with self._uncounted():
                    copied.__dict__[name] = self(item)
            else:
                copied.__dict__[name] = self(item)
        if is_optimizer:
            step: Any = type(value).step
            if getattr(step, "hooked", False):
                step = step.__wrapped__  # the wrapper runs hooks registered for all optimizers
            copied.__dict__["step"] = types.MethodType(step, copied)
        return copied


def _is_plain(value: Any) -> bool:
    """Whether an object is what its attributes are: nothing that C++ knows of, and no string or number by class."""
    if not isinstance(getattr(value, "__dict__", None), dict):
        return False
    made: Any = type(value).__new__
    return made is object.__new__ or isinstance(value, torch.optim.Optimizer)


def _number(scalar: torch.Tensor) -> Any:
    with no_modes():
        return scalar.item()
