"""What would help where memory ran out, the cheapest first; what a plan costs is memopt's planner's to say."""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from memopt.budget import BudgetError, format_bytes
from memopt.errors import first_line
from memopt.memory.allocator import segments_expand
from memopt.memory.distributed import has_group
from memopt.monitoring.record import Leak, OutOfMemory
from memopt.torch_compat import pytree

_WORTH = 20  # what saves less than held / _WORTH is no fix


@dataclasses.dataclass(frozen=True)
class _Layout:
    """A tensor without its memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def made(self) -> torch.Tensor:
        """A tensor of zeros that is like it."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device, requires_grad=self.requires_grad)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a model: what can be planned, without holding the model or its inputs."""

    model: weakref.ref[nn.Module]
    inputs: Any
    training: bool

    @classmethod
    def of(cls, model: nn.Module, args: Any, kwargs: Any) -> Call:
        """The call of a model with these arguments."""

        def described(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf if isinstance(leaf, (bool, int, float, str, type(None))) else _Unknown(type(leaf).__name__)
            return _Layout(tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad and leaf.is_leaf)

        return cls(weakref.ref(model), pytree.tree_map(described, (tuple(args), dict(kwargs))), model.training)


@dataclasses.dataclass(frozen=True)
class _Unknown:
    """An argument that is neither a tensor nor a number."""

    kind: str


def fixes(
    short: OutOfMemory,
    leaks: Sequence[Leak],
    limit: int | None,
    call: Call | None,
    optimizers: Sequence[torch.optim.Optimizer],
) -> tuple[str, ...]:
    """One line for each.

    Args:
        short: the moment.
        leaks: tensors that each step leaves.
        limit: bytes that the device is to hold; None: what others leave of it.
        call: of the model, to be planned; None: the planner is not asked.
        optimizers: that have stepped.
    """
    held, found = short.filled.bytes, []
    for leak in leaks:
        if leak.tensors.bytes * _WORTH >= held:
            how = "detach() what is kept of them" if leak.in_graph else "keep fewer of them, or on the CPU"
            made = leak.tensors.line.partition(", ")[2] or leak.tensors.module
            found.append(
                f"free {_short(leak.tensors.bytes)}: {leak.tensors.count} tensors that {leak.steps} steps left "
                f"({made}): {how}"
            )
    if short.reserved is not None and (short.reserved - held) * _WORTH >= held and not segments_expand():
        found.append(
            f"{_short(short.reserved - held)} are reserved and hold no tensor: "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        )
    if short.others is not None and short.others * _WORTH >= held:
        found.append(f"{_short(short.others)} of the device are not PyTorch's: other processes, NCCL, CUDA's context")
    if limit is None and short.capacity is not None and short.others is not None:
        limit = short.capacity - short.others
    if call is not None:
        found += _planned(call, limit, optimizers)
    return tuple(found)


def _planned(call: Call, limit: int | None, optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
    """What the planner says of the model within the limit; nothing where it cannot be asked."""
    from memopt.api import plan  # with all of the planner: only where memory ran out
    from memopt.module import CompiledModule

    model = call.model()
    if model is None or limit is None or has_group():
        return []
    if isinstance(model, CompiledModule):
        return ["the model is compiled by memopt already: give it a budget, or a smaller one (report.curve)"]
    unknown = [leaf.kind for leaf in pytree.tree_leaves(call.inputs) if isinstance(leaf, _Unknown)]
    if unknown:
        return [f"no plan: the model was called with a {unknown[0]}"]
    whole = limit >= 10**7 or limit % 10**6 == 0
    unit, name = (10**6, "MB") if whole else (10**3, "kB") if limit >= 10**4 else (1, "B")
    size, told = f"{limit // unit}{name}", ", optimizer=optimizer" if optimizers else ""
    words = f'memopt.compile(model, budget="{size}"{told})'
    was = model.training
    try:
        args, kwargs = pytree.tree_map(lambda leaf: leaf.made() if isinstance(leaf, _Layout) else leaf, call.inputs)
        model.train(call.training) if was != call.training else None
        report = plan(model, _inputs(args, kwargs, model), size, optimizer=list(optimizers) or None)
    except BudgetError as error:
        return [f"{words} does not fit: {first_line(error)}"]
    except Exception as error:  # the error on its way is the user's, whatever the planner meets
        return [f"no plan: {first_line(error)}"]
    finally:
        if model.training != was:
            model.train(was)
    chosen = [point.extra for point in report.curve if point.chosen]
    cost = f", a step takes {chosen[0]:+.1%}" if chosen else ""
    return [f"{words}: a predicted peak of {_short(report.peak_bytes)}{cost}"]


def _inputs(args: tuple[Any, ...], kwargs: dict[str, Any], model: nn.Module) -> Any:
    """As `plan` takes them: positions, or keywords; both become keywords by the names of `forward`."""
    if not args or not kwargs:
        return kwargs or args
    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    return dict(bound.arguments)


def _short(size: int) -> str:
    return format_bytes(size, short=True)
