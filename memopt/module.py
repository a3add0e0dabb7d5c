"""CompiledModule: the model's stand-in that plans at the first call and then runs what was planned."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memopt.budget import BudgetError, OutOfBudgetError
from memopt.calls.group import Group
from memopt.calls.model_calls import ModelCalls
from memopt.capture.export import CaptureError
from memopt.options import Options
from memopt.report.record import Report
from memopt.torch_compat.dynamo import waited_for_other_thread
from memopt.torch_compat.exporting import is_exporting
from memopt.torch_compat.modules import change_tensors
from memopt.torch_compat.traced_again import trace_again
from memopt.torch_compat.transforms import compiled_from

log = logging.getLogger("memopt")

# Methods that Python looks for at classes alone: a stand-in has them if its model does.
_CONTAINER = ("__len__", "__getitem__", "__setitem__", "__delitem__", "__iter__", "__contains__", "__reversed__")

# Methods that are to see the model itself: its attributes' names, its class.
_MODELS = ("add_module", "apply", "register_buffer", "register_module", "register_parameter")

# Methods of models that call them with one size after the other: the calls are the stand-in's.
_CALLING = ("generate",)

# State of a module that the stand-in and its model share as the same objects.
_SHARED = (
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)

# What is set on the stand-in itself: hooks that run around its calls, and a `forward` that was wrapped around its own.
_OWN = frozenset(vars(nn.Module())) - {*_SHARED, "training"} | {"forward", "__dict__"}


class CompiledModule(nn.Module):
    """A model that trains and infers as before, within its budget.

    It holds the model's own parameter and buffer objects under the model's own names, so that optimizers, checkpoints
    and `state_dict` work on either; attributes are the model's, read and set. The first call with new shapes, or in a
    new mode, captures and plans; later calls run what was planned. `report` tells what was done. Hooks of the stand-in
    and of the model run at every call; those of its parts, as in `torch.compile`, are captured: of ones registered or
    removed after a call nothing is seen. It is an instance of the model's own class, too, and `forward` has the model's
    signature where that says more than that there is one argument: libraries ask for both.
    """

    _memopt: ModelCalls  # all that is the stand-in's own

    def __new__(cls, model: nn.Module, options: Options, group: Group | None = None) -> CompiledModule:
        """A stand-in of a kind that has a length, items and so on where the model has."""
        return super().__new__(_kind_of(type(model)))

    def __init__(self, model: nn.Module, options: Options, group: Group | None = None) -> None:
        """Wrap the model; nothing is compiled yet. Other models of the group share the budget."""
        super().__init__()
        object.__setattr__(self, "_memopt", ModelCalls(model, options, group))
        for kind in _SHARED:
            self.__dict__[kind] = getattr(model, kind)
        del self.__dict__["training"]  # the model's is asked for
        self.__dict__["__module__"] = type(model).__module__  # by which pipelines of diffusers name what they save

    # -- the user's surface --------------------------------------------------------------------------------------

    @property  # type: ignore[misc]
    def __class__(self) -> type[nn.Module]:  # type: ignore[override]
        """The model's class, for `isinstance`; as with any attribute, one that is set is set on the model."""
        calls = self.__dict__.get("_memopt")
        return type(self) if calls is None else calls.model.__class__

    @property
    def report(self) -> Report:
        """What the latest compilation did.

        Raises:
            RuntimeError: nothing was compiled yet.
        """
        loop: Any = self.__dict__.get("_memopt_loop")  # the integration of a loop that compiles what it calls
        return self._memopt.report if loop is None else loop.report

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model as planned; plan first where these shapes and this mode are new.

        Raises:
            BudgetError: no plan keeps the budget. Nothing was run, and nothing of the model has changed.
            CaptureError: nothing can be planned, as graphs depend on the values of tensors or none can be captured, and
                what the model takes eagerly cannot be counted.
            MemoryError: the device had less memory left than the step needs.
        """
        if torch.compiler.is_compiling() and (torch.compiler.is_dynamo_compiling() or not waited_for_other_thread()):
            if self._memopt.inlined or is_exporting():
                return self._memopt.model(*args, **kwargs)
            return _run_outside(self, args, kwargs)
        self._memopt.is_reached()
        try:
            with self._memopt.sessions.agreement.sought():
                return self._memopt.run(args, kwargs)
        except BudgetError as error:
            refused, cause = OutOfBudgetError.of(self._memopt.residents.in_bytes(error, args, kwargs)), error.__cause__
        except Exception as error:  # the model's own, most likely
            trace_again(error)
            raise
        # Out here, so that what the caller catches holds none of the tensors in the frames that planned.
        raise refused from cause

    def set_optimizer(self, optimizer: Any) -> None:
        """Count this optimizer from now on, in place of what was given before; it is never stepped here.

        Args:
            optimizer: as `memopt.compile` takes it; None: none.

        Raises:
            TypeError: it is neither an optimizer, nor several, nor what makes one.
            ValueError: it holds none of the model's parameters that are trained.
        """
        self._memopt.optimizers.replace(optimizer)

    # -- the model's surface -------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> CompiledModule:
        """Set the model's mode."""
        self._memopt.model.train(mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> CompiledModule:
        with self._memopt.sessions.moving():
            change_tensors(self._memopt.model, fn, recurse)
        return self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Refused.

        Raises:
            TypeError: always.
        """
        raise TypeError("this model is compiled by memopt already: compile the original model, or leave .compile()")

    def _replicate_for_data_parallel(self) -> Any:
        raise RuntimeError(
            "DataParallel copies a model at each call: use DistributedDataParallel, or memopt.compile on one device"
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own state dict, with its own keys."""
        return self._memopt.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the model."""
        return self._memopt.model.load_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        calls = self.__dict__.get("_memopt")
        if name == "report" and calls is not None:
            return CompiledModule.report.__get__(self)  # raises what the property did
        if calls is None or (name.startswith("__") and name not in vars(calls.model)):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        if name == "configure_callbacks" and name not in vars(calls.model):  # how Lightning's loop asks a model
            from memopt.integrations.lightning import callbacks_of

            return callbacks_of(self, getattr(calls.model, name))
        if name in _CALLING and calls.options.engine.many_sizes and name not in vars(calls.model):
            return _calling(self, name)
        value = getattr(calls.model, name)
        if calls.others is None or calls.inlined or "_memopt_loop" in self.__dict__:
            return value
        return calls.others.watched(name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
            if name == "forward" and getattr(value, "__func__", None) is not type(self).forward:
                _watch_forward(self)
            return
        setattr(self._memopt.model, name, value)
        if name in _SHARED:
            self.__dict__[name] = getattr(self._memopt.model, name)

    def __delattr__(self, name: str) -> None:
        if name in _OWN:
            object.__delattr__(self, name)
        else:
            delattr(self._memopt.model, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *vars(self), *dir(self._memopt.model)})

    def __copy__(self) -> CompiledModule:
        return self._beside(copy.copy(self._memopt.model))

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModule:
        return self._beside(copy.deepcopy(self._memopt.model, memo))

    def __reduce__(self) -> Any:
        return CompiledModule, (self._memopt.model, self._memopt.options)

    def _beside(self, model: nn.Module) -> CompiledModule:
        """A stand-in of a copy. It is planned without the optimizer, which does not step the copy's parameters."""
        copied = CompiledModule(model, self._memopt.options)
        copied._memopt.is_part(self._memopt.inlined)  # a part of a model that is compiled is one of its copy, too
        return copied


def calls_of(stand_in: CompiledModule) -> ModelCalls:
    """The calls of a stand-in's model, which lie apart from its attributes: those are the model's."""
    return stand_in._memopt


def compilable(model: Any) -> tuple[nn.Module, list[str]]:
    """The model to compile, and notes for the user: of one that was compiled by torch.compile, what that was made of.

    Raises:
        TypeError: it is no module, or one that torch.compile does not take.
    """
    notes = []
    while (inner := compiled_from(model)) is not None:
        notes = ["the model was compiled by torch.compile: memopt compiles what that was made of, under its own names"]
        model = inner
    if not isinstance(model, nn.Module):
        raise TypeError(f"memopt.compile takes a torch.nn.Module, not {type(model).__name__}")
    if isinstance(model, CompiledModule):
        raise TypeError("this model is compiled already: compile the original model")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(f"memopt.compile takes a module of Python code, not {type(model).__name__}: the original model")
    if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
        raise TypeError("DataParallel copies the model at each call: compile model.module for one device, or use DDP")
    for name, part in model.named_modules():
        if isinstance(part, CompiledModule):
            part._memopt.is_part()
            notes.append(f"{name} is a stand-in of memopt's: within this model it is compiled as a part of it")
    return model, notes


def _calling(stand_in: CompiledModule, name: str) -> Any:
    """A method of the model, the calls in which are planned as the stand-in's are."""
    from memopt.in_place import calling

    calls = stand_in._memopt

    def call(*args: Any, **kwargs: Any) -> Any:
        if calls.options.budget is None and calls.sessions.sizing.many:
            return calls.model(*args, **kwargs)  # each token would be planned
        return stand_in(*args, **kwargs)

    if any(vars(base).get("__slots__") for base in type(calls.model).__mro__):
        return getattr(calls.model, name)
    return getattr(calling(calls.model, call), name)


def _watch_forward(stand_in: CompiledModule) -> None:
    """Look once whether a `forward` in place of the stand-in's own calls that one; where not, nothing is planned."""
    calls = stand_in._memopt
    calls.is_reached(False)

    def look(module: nn.Module, args: Any, outputs: Any) -> None:
        handle.remove()
        if calls.reached:
            return
        text = (
            f"forward of {type(calls.model).__name__}'s stand-in was replaced by one that does not call it, so that "
            "nothing of it is planned: replace the model's own before memopt.compile, or compile the model in place, "
            "as memopt.integrations.hf.MemoptCallback does"
        )
        if calls.options.budget is not None:
            raise CaptureError(text)
        log.warning("memopt: %s", text)

    handle = stand_in.register_forward_hook(look)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run_outside(stand_in: CompiledModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The stand-in's call within a model that torch.compile compiles: between two of its graphs."""
    return CompiledModule.forward(stand_in, *args, **kwargs)


def _kind_of(model: type[nn.Module]) -> type[CompiledModule]:
    """The kind of CompiledModule for models of a class: with its container methods, and methods of modules it changes.

    Of what hooks and calls are made of it keeps its own; `forward` has the signature of the model's.
    """
    if model not in _kinds:
        names = {name for name in _CONTAINER if hasattr(model, name)}
        for name in vars(nn.Module):
            kept = name.startswith("_") or name in vars(CompiledModule) or "hook" in name
            if not kept and getattr(model, name) is not getattr(nn.Module, name):
                names.add(name)
        own = {name: _passed_on(name) for name in sorted(names)}
        signature = _signature(model.forward)
        if signature is not None and len(signature.parameters) > 2:  # callers choose among arguments, by their names
            own["forward"] = _signed(CompiledModule.forward, signature)
        made = type(CompiledModule.__name__, (CompiledModule,), {"__module__": __name__, **own})
        _kinds[model] = made if own else CompiledModule
    return _kinds[model]


def _signature(function: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def _signed(function: Any, signature: inspect.Signature) -> Callable[..., Any]:
    """A copy of a function that tells another signature; its code is the same, so that no call takes longer."""
    copied = types.FunctionType(function.__code__, function.__globals__, function.__name__)
    copied.__doc__ = function.__doc__
    copied.__signature__ = signature  # type: ignore[attr-defined]
    return copied


def _passed_on(name: str) -> Callable[..., Any]:
    """A method that is the model's; if the model returns itself, the stand-in does."""

    def method(self: CompiledModule, *args: Any, **kwargs: Any) -> Any:
        with contextlib.nullcontext() if name.startswith("__") else self._memopt.sessions.moving():
            result = getattr(self._memopt.model, name)(*args, **kwargs)
        return self if result is self._memopt.model else result

    method.__name__ = name
    return method


for _name in _MODELS:
    setattr(CompiledModule, _name, _passed_on(_name))

_kinds: weakref.WeakKeyDictionary[type[nn.Module], type[CompiledModule]] = weakref.WeakKeyDictionary()
