"""What a module keeps and what surrounds its forward, where `nn.Module` has no public name; tried on 2.11 and 2.13."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as rooms

_CALL, _CALL_IMPL = nn.Module.__call__, nn.Module._call_impl
_CALL_CODE = _CALL_IMPL.__code__
_CALL_CODES = frozenset({_CALL.__code__, _CALL_CODE})
# Within the call of a module that has hooks.
_HOOKED_CODE = next(
    (item for item in _CALL_CODE.co_consts if isinstance(item, types.CodeType) and item.co_name == "inner"), None
)


def own_parameters(module: nn.Module) -> Mapping[str, nn.Parameter | None]:
    """The parameters that a module itself has, by name; None for one that it goes without, as a bias."""
    return module._parameters


def own_buffers(module: nn.Module) -> Mapping[str, torch.Tensor | None]:
    """The buffers that a module itself has, by name; None for one that it goes without."""
    return module._buffers


def held_by(module: nn.Module, name: str) -> torch.Tensor | None:
    """The parameter or buffer that a module itself has under a name now; None for none."""
    for tensors in (module._parameters, module._buffers):  # of TorchScript's modules they have no `get`
        if name in tensors and tensors[name] is not None:
            return tensors[name]
    return None


def own_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The parameters and buffers that a module itself has, with their names in it."""
    found = [*module._parameters.items(), *module._buffers.items()]
    return [(name, value) for name, value in found if value is not None]


def own_modules(module: nn.Module) -> Mapping[str, nn.Module | None]:
    """The modules that a module itself has, by name; None for one that it goes without."""
    return module._modules


def modules_of(model: nn.Module) -> list[nn.Module]:
    """What `model.modules()` goes through, in its order, in a plain loop: it is gone through before each call."""
    found: dict[int, nn.Module] = {}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if id(module) not in found:
            found[id(module)] = module
            if inner := module._modules:
                waiting.extend([part for part in inner.values() if part is not None][::-1])
    return list(found.values())


def requires_gradients(model: nn.Module) -> tuple[bool, ...]:
    """Whether each parameter of a model is trained, in the order of its modules; one that is shared as often as it is.

    A plain loop: `parameters` looks for names and repetitions, and takes ten times as long before each call.
    """
    own = (module._parameters for module in modules_of(model))
    return tuple([each.requires_grad for parameters in own for each in parameters.values() if each is not None])


def change_tensors(module: nn.Module, change: Callable[[Any], Any], recurse: bool = True) -> None:
    """Set the tensors of a module, and with `recurse` of its modules, to what `change` makes of each, as `to` does."""
    module._apply(change, recurse)  # type: ignore[no-untyped-call]


def goes_straight(model: nn.Module, owner: type[nn.Module], function: types.FunctionType) -> bool:
    """Whether calling the model calls this function and nothing else: no hooks, nothing overridden."""
    if type(model) is not owner or owner.forward is not function or "forward" in model.__dict__:
        return False
    if owner.__call__ is not _CALL or owner._call_impl is not _CALL_IMPL or model._compiled_call_impl is not None:
        return False
    own = model._forward_hooks or model._forward_pre_hooks or model._backward_hooks or model._backward_pre_hooks
    return not (own or _has_global_hooks())


# Attributes that torch.compile sets on a user's module.
OF_COMPILER = frozenset({"_is_torch_compile"})


def forward_hooks(module: nn.Module) -> list[Any]:
    """What a user has registered to be called around a module's forward, for all modules too; torch's own left out."""
    own = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    found = [*own, *rooms._global_forward_hooks.values(), *rooms._global_forward_pre_hooks.values()]
    return [hook for hook in found if not str(getattr(type(hook), "__module__", "")).startswith("torch.")]


def _has_global_hooks() -> bool:
    forward = rooms._global_forward_hooks or rooms._global_forward_pre_hooks
    return bool(forward or rooms._global_backward_hooks or rooms._global_backward_pre_hooks)


def has_disabled_forward(model: nn.Module) -> bool:
    """Whether the forward of the model or of a module of its is kept from being traced by `torch.compiler.disable`."""
    return any(getattr(module.forward, "_torchdynamo_disable", False) for module in modules_of(model))


def hooks_after_accumulation(parameter: torch.Tensor) -> dict[int, Callable[[torch.Tensor], None]] | None:
    """The hooks that run as soon as a parameter's gradient is accumulated, to look at or to change; None for none."""
    return getattr(parameter, "_post_accumulate_grad_hooks", None)


def hooks_of_gradient(tensor: torch.Tensor) -> dict[int, Callable[[Any], Any]] | None:
    """The hooks that are called with a tensor's gradient before it is accumulated or handed on; None for none."""
    return tensor._backward_hooks


def is_stepped_in_backward(parameter: torch.Tensor) -> bool:
    """Whether torch.distributed steps an optimizer of the parameter's own within backward."""
    return hasattr(parameter, "_in_backward_optimizers")


def running_replica() -> Any:
    """The `DistributedDataParallel` whose forward runs, if one does; torch.distributed must be there."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel._active_ddp_module


def called_module(frame: types.FrameType) -> nn.Module | None:
    """The module whose call a frame is, with `args` and `kwargs` in its `f_locals`; None for another one, and for
    graphs of torch.compile's. Tried on 2.13.
    """
    if frame.f_code is not _CALL_CODE:
        return None
    module: nn.Module = frame.f_locals["self"]
    return None if isinstance(module, torch.fx.GraphModule) else module


def calls_module(frame: types.FrameType) -> bool:
    """Whether a frame is torch's own around the `forward` of the module that is its `self`; tried on 2.11 and 2.13."""
    return frame.f_code in _CALL_CODES


def calls_hooks(frame: types.FrameType) -> bool:
    """Whether a frame is torch's own that calls hooks with what a module's forward returns; tried on 2.11 and 2.13."""
    return _HOOKED_CODE is not None and frame.f_code is _HOOKED_CODE


def hooks_behind(module: nn.Module) -> list[Any]:
    """The hooks that see what a module's forward returns, or its gradients, and those of all modules."""
    own = [*module._forward_hooks.values(), *module._backward_hooks.values(), *module._backward_pre_hooks.values()]
    of_all = (rooms._global_forward_hooks, rooms._global_backward_hooks, rooms._global_backward_pre_hooks)
    return own + [hook for hooks in of_all for hook in hooks.values()]


def called_in(error: BaseException) -> list[nn.Module]:
    """The modules whose calls an error went through, innermost first."""
    found, trace = [], error.__traceback__
    while trace is not None:
        found.append(called_module(trace.tb_frame))
        trace = trace.tb_next
    return [module for module in found[::-1] if module is not None]


def uncompiled(module: nn.Module) -> nn.Module:
    """What torch.compile has compiled, if the module is what it returned; else the module itself."""
    if "_orig_mod" not in module._modules:
        return module
    inner = module._modules["_orig_mod"]
    return module if inner is None else inner
