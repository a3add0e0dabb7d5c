"""What an optimizer holds between steps and needs during one, counted by stepping a copy of it on fake tensors."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import optimizer as torch_optimizer
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from memopt.errors import first_line
from memopt.memory.ledger import Ledger
from memopt.memory.rounding import allocated_bytes

OptimizerLike = torch.optim.Optimizer | Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

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
    kernel allocates inside itself is not seen (a float32 copy in norms of half-precision tensors on CPU).

    Args:
        optimizer: an optimizer, or its class or any callable that makes one from a list of parameters.
        parameters: the tensors that will have gradients; those that require none are ignored.
        target: count as if they lay on this device, which need not be here: optimizers choose how to step by it.

    Raises:
        ValueError: the optimizer has none of the parameters, they lie on several devices, or the optimizer cannot be
            stepped apart from the model (LBFGS) or on dense gradients (SparseAdam).
    """
    trained = {id(p): p for p in parameters if p.requires_grad}
    devices = {p.device for p in trained.values()}
    if len(devices) != 1:
        found = sorted(map(str, devices)) or "none"
        raise ValueError(f"the optimizer's parameters must lie on one device, not {found}")
    device = devices.pop()
    twins, ledger = _Twins(trained, target), _Ledger(target or device)
    name = getattr(optimizer, "__name__", type(optimizer).__name__)
    try:
        # Constructors read rates and flags: only parameters are fake here.
        built = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer(twins.all())
        name = type(built).__name__
        existing = 0 if twins.made(built) else _bytes_of(built.state, device)
        with twins.mode, ledger, _foreach_as_if_real():
            return _count(twins.copy(built, ledger), ledger, existing)
    except _CannotCount as error:
        raise ValueError(f"{name}: {error}") from None
    except Exception as error:
        raise ValueError(f"{name} cannot be counted: a step on fake tensors fails: {first_line(error)}") from error


class _CannotCount(Exception):
    pass


def _count(optimizer: torch.optim.Optimizer, ledger: _Ledger, existing: int) -> OptimizerFootprint:
    if not any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
        raise _CannotCount("holds none of the parameters that have gradients")
    step: Any = type(optimizer).step
    closure = inspect.signature(step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise _CannotCount("runs the model inside step(), so its memory cannot be counted apart from the model's")
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # the wrapper runs hooks registered for all optimizers
    peaks = []
    for count in (None, None, _LATER):
        if count is not None:
            _set_steps(optimizer, count)
        ledger.peak = ledger.live
        step(optimizer)
        peaks.append(ledger.peak)
    return OptimizerFootprint(ledger.live, existing, max(peaks) - ledger.live)


def _set_steps(optimizer: torch.optim.Optimizer, count: int) -> None:
    for state in optimizer.state.values():
        step = state.get("step") if isinstance(state, Mapping) else None
        if isinstance(step, torch.Tensor) and step.ndim == 0:
            state["step"] = torch.tensor(count, dtype=step.dtype, device=step.device)
        elif isinstance(step, (int, float)):
            state["step"] = type(step)(count)


def _bytes_of(state: Any, device: torch.device) -> int:
    storages = {
        leaf.untyped_storage()._cdata: allocated_bytes(leaf.untyped_storage().nbytes(), device)
        for value in state.values()
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, torch.Tensor) and leaf.device == device
    }
    return sum(storages.values())


# -- fake copies ------------------------------------------------------------------------------------------------------


class _Twins:
    """Fake tensors that stand for real ones: one per tensor, with a gradient where the real one will have one."""

    def __init__(self, trained: Mapping[int, torch.Tensor], target: torch.device | None) -> None:
        self.mode = FakeTensorMode()
        self.target = target
        self.trained = trained
        self.twins: dict[int, torch.nn.Parameter] = {}
        self.own: set[int] = set()
        with self.mode:
            for parameter in trained.values():
                self(parameter)

    def all(self) -> list[torch.nn.Parameter]:
        """The twins of the parameters that have gradients."""
        return [self.twins[key] for key in self.trained]

    def __call__(self, parameter: torch.Tensor) -> torch.Tensor:
        if id(parameter) in self.own:
            return parameter
        if id(parameter) not in self.twins:
            twin = torch.nn.Parameter(self._empty(parameter), requires_grad=parameter.requires_grad)
            if id(parameter) in self.trained:
                twin.grad = self._empty(parameter)
            self.twins[id(parameter)] = twin
            self.own.add(id(twin))
        return self.twins[id(parameter)]

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=self.target or like.device)

    def made(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer holds fake parameters already."""
        return all(id(p) in self.own for group in optimizer.param_groups for p in group["params"])

    def copy(self, optimizer: torch.optim.Optimizer, ledger: _Ledger) -> torch.optim.Optimizer:
        """Return a copy whose parameters, state and other tensors are fake; only state is entered in the ledger."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}

        def fake(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) in held:
                return self(leaf)
            if leaf.ndim == 0 and leaf.device.type == "cpu":
                return torch.tensor(_number(leaf), dtype=leaf.dtype)  # a step count or rate: its value stays known
            return self._empty(leaf)

        copied = type(optimizer).__new__(type(optimizer))
        with ledger.pause():
            for key, value in optimizer.__dict__.items():
                if key in ("state", "step"):  # a learning-rate scheduler binds the real optimizer's step
                    continue
                is_hooks = key.endswith("_hooks")
                copied.__dict__[key] = collections.OrderedDict() if is_hooks else pytree.tree_map(fake, value)
        copied.state = collections.defaultdict(dict)
        for parameter, value in optimizer.state.items():
            copied.state[fake(parameter)] = pytree.tree_map(fake, value)
        return copied


def _number(scalar: torch.Tensor) -> Any:
    with _disable_current_modes():
        return scalar.item()


def _assumed(dtype: torch.dtype) -> bool | int | float:
    """The number that stands for a value which only a real run would know."""
    if dtype is torch.bool:
        return False
    return 1.0 if dtype.is_floating_point else 1


@contextlib.contextmanager
def _foreach_as_if_real() -> Iterator[None]:
    """Let optimizers that choose their implementation by the parameters' type choose as for real parameters."""
    types: list[Any] = torch_optimizer._foreach_supported_types
    types.append(torch._subclasses.FakeTensor)
    try:
        yield
    finally:
        types.remove(torch._subclasses.FakeTensor)


class _Ledger(Ledger):  # type: ignore[no-untyped-call]
    """Counts what a step of the optimizer makes; a number that only a real run would know is assumed."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and getattr(args[0], "constant", None) is None:
            return _assumed(args[0].dtype)
        return super().__torch_dispatch__(func, types, args, kwargs)
