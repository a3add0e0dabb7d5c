"""What an optimizer holds between steps and needs during one, counted by stepping a copy of it on fake tensors."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch

from memopt.errors import first_line
from memopt.memory.ledger import Ledger
from memopt.memory.optimizer_copy import CannotCount, Twins
from memopt.memory.reach import held_tensors, optimizers_in, plain_tensors
from memopt.memory.rounding import allocated_bytes
from memopt.torch_compat import pytree
from memopt.torch_compat.operators import schema_of
from memopt.torch_compat.optimizers import fakes_as_if_real
from memopt.torch_compat.storages import storage_id

OptimizerLike = torch.optim.Optimizer | Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

_NUMBER = 8  # bytes of a Python number
_LATER = 1000  # a step count at which warm-up branches (RAdam's rectification) are over


@dataclasses.dataclass(frozen=True)
class OptimizerFootprint:
    """The bytes of an optimizer on the device of its parameters.

    Attributes:
        state_bytes: held between steps, once every parameter with a gradient was stepped.
        existing_state_bytes: the part of it that exists already.
        step_peak_bytes: the most bytes alive during a steady step, above parameters, gradients and state.
    """

    state_bytes: int
    existing_state_bytes: int
    step_peak_bytes: int


def optimizer_footprint(
    optimizer: OptimizerLike, parameters: Iterable[torch.Tensor], target: torch.device | None = None
) -> OptimizerFootprint:
    """Count an optimizer's bytes. The optimizer, the parameters, their hooks and the random state are not touched.

    A copy is stepped on fake parameters with dense gradients, so what a step allocates is what is counted. Where the
    optimizer reads a number out of a tensor (Adafactor's norms), the copy reads 1; of a flag it reads False. What a
    kernel allocates inside itself is not seen (a float32 copy in norms of half-precision tensors on CPU), but for the
    numbers that it makes tensors of.

    Args:
        optimizer: an optimizer, or its class or any callable that makes one from a list of parameters.
        parameters: the tensors that will have gradients; those that require none are ignored.
        target: count as if they lay on this device, which need not be here: optimizers choose how to step by it.

    Raises:
        UncountedError: the optimizer cannot be stepped apart from the model (LBFGS), on dense gradients (SparseAdam) or
            on fake tensors.
        ValueError: the optimizer has none of the parameters, they lie on several devices, or none can be made.
    """
    trained = {id(p): p for p in parameters if p.requires_grad}
    devices = {p.device for p in trained.values()}
    if len(devices) != 1:
        found = sorted(map(str, devices)) or "none"
        raise ValueError(f"the optimizer's parameters must lie on one device, not {found}")
    device = devices.pop()
    name, make = name_of(optimizer), cast(Any, optimizer)
    twins, ledger = Twins(trained, target), _Ledger(target or device)
    try:
        # Constructors read rates and flags: only parameters are fake here.
        built = optimizer if is_optimizer(optimizer) else make(twins.all())
    except Exception as error:
        raise ValueError(f"{name} cannot be made of a list of parameters: {first_line(error)}") from error
    if not is_optimizer(built):
        raise ValueError(f"{name} makes no optimizer of a list of parameters, but {type(built).__name__}")
    name = type(built).__name__
    groups = [group for item in (built, *optimizers_in(built)) for group in getattr(item, "param_groups", ())]
    if not any(twins.has_gradient(p) for group in groups for p in group["params"]):
        raise ValueError(
            f"{name}: holds none of the parameters that have gradients: leave it out where it steps copies of them, as "
            "weights in float32, which are counted as they are found"
        )
    try:
        existing = 0 if twins.made(built) else state_bytes(built, trained.values(), device)
        with twins.mode, ledger, fakes_as_if_real():
            return _count(twins.copy(built, ledger.pause), ledger, existing)
    except CannotCount as error:
        raise UncountedError(f"{name}: {error}") from None
    except Exception as error:
        raise UncountedError(f"{name} cannot be counted: a step on fake tensors fails: {first_line(error)}") from error


def name_of(optimizer: Any) -> str:
    """What an optimizer, its class or what makes it is called in messages."""
    while isinstance(optimizer, functools.partial):
        optimizer = optimizer.func
    return str(getattr(optimizer, "__name__", type(optimizer).__name__))


class UncountedError(ValueError):
    """An optimizer that is not to be counted by a step on fake tensors; the message says why."""


def is_optimizer(value: Any) -> bool:
    """Whether a value is an optimizer, or wraps one and steps as one."""
    if isinstance(value, torch.optim.Optimizer):
        return True
    if isinstance(value, (type, torch.nn.Module)) or not callable(getattr(value, "step", None)):
        return False
    return hasattr(value, "param_groups")


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """The parameters that an optimizer was given, in the order of its groups, trained or not."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def state_bytes(optimizer: Any, parameters: Iterable[torch.Tensor], device: torch.device) -> int:
    """Bytes of what an optimizer, and all that it wraps, holds on a device by now, without parameters and gradients."""
    given = [p for item in optimizers_in(optimizer) for p in parameters_of(item)]
    given = [*given, *parameters]
    known = {_key(part) for p in given for t in (p, p.grad) if t is not None for part in plain_tensors(t)}
    found = {
        _key(plain): allocated_bytes(plain.untyped_storage().nbytes(), device)
        for tensor in held_tensors(optimizer)
        for plain in plain_tensors(tensor)
        if plain.device == device and plain.layout is torch.strided
    }
    return sum(size for key, size in found.items() if key not in known)


def _key(tensor: torch.Tensor) -> int:
    return storage_id(tensor) if tensor.layout is torch.strided else id(tensor)


def _count(optimizer: Any, ledger: _Ledger, existing: int) -> OptimizerFootprint:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise CannotCount("runs the model inside step(), so its memory cannot be counted apart from the model's")
    peaks = []
    for count in (None, None, _LATER):
        if count is not None:
            _set_steps(optimizer, count)
        ledger.peak = ledger.live
        optimizer.step()
        peaks.append(ledger.peak)
    return OptimizerFootprint(ledger.live, existing, max(peaks) - ledger.live)


def _set_steps(optimizer: Any, count: int) -> None:
    for state in (state for item in optimizers_in(optimizer) for state in item.state.values()):
        step = state.get("step") if isinstance(state, Mapping) else None
        if isinstance(step, torch.Tensor) and step.ndim == 0:
            state["step"] = torch.tensor(count, dtype=step.dtype, device=step.device)
        elif isinstance(step, (int, float)):
            state["step"] = type(step)(count)


# -- what is alive -----------------------------------------------------------------------------------------------------


def _assumed(dtype: torch.dtype) -> bool | int | float:
    """The number that stands for a value which only a real run would know."""
    if dtype is torch.bool:
        return False
    return 1.0 if dtype.is_floating_point else 1


class _Ledger(Ledger):  # type: ignore[no-untyped-call]
    """Counts what a step of the optimizer makes; a number that only a real run would know is assumed."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and getattr(args[0], "constant", None) is None:
            return _assumed(args[0].dtype)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.counting and self.device.type == "cpu":
            self.peak = max(self.peak, self.live + _number_bytes(func, args))
        return result


def _number_bytes(func: Any, args: Sequence[Any]) -> int:
    """Bytes that a kernel on the CPU takes for a number beside tensors: as a tensor of its own, and in their type.

    Foreach operators do so for one tensor after another.
    """
    tensors = pytree.tree_leaves([item for item in args if isinstance(item, (torch.Tensor, list, tuple))])
    sizes = [item.element_size() for item in tensors if isinstance(item, torch.Tensor)]
    if not sizes or not any(
        isinstance(item, (int, float))
        and (isinstance(argument.type, torch.TensorType) or func.__name__.startswith("_foreach_"))
        for item, argument in zip(_leading(args), schema_of(func).arguments, strict=False)
    ):
        return 0
    return _NUMBER + max(sizes)


def _leading(args: Sequence[Any]) -> list[Any]:
    """The arguments, and for a list of numbers its first."""
    return [item[0] if isinstance(item, (list, tuple)) and item else item for item in args]
