"""Nodes of Dynamo's graphs that only Dynamo makes, and what it traces otherwise than torch runs it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo import convert_frame, eval_frame, exc, external_utils, trace_rules, utils
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.misc import AutogradFunctionVariable
from torch._dynamo.variables.tensor import TensorVariable

from memopt.torch_compat.backward import backward_task
from memopt.torch_compat.patched import replaced


def sets_grad_mode(node: fx.Node) -> bool | None:
    """The grad mode that a node of Dynamo's sets for what comes after it; None where it sets none.

    Tried on torch 2.11 and 2.13.
    """
    return bool(node.args[0]) if node.target is torch._C._set_grad_enabled else None


class Kept:
    """A backend and what it has made of graphs, for as long as this is kept.

    Dynamo keeps the backend that it called last, after an error and `torch._dynamo.reset()` too; and for good the code
    of a frame that calls another one's in its middle, as at a graph break, and the functions which that calls (torch
    2.11 to 2.14). With them would stay the weights that they know.
    """

    def __init__(self, backend: Callable[..., Any]) -> None:
        """It has made nothing yet."""
        self._backend = backend
        # By what Dynamo calls, as it may drop that earlier.
        self._made: weakref.WeakKeyDictionary[Callable[..., Any], _Function] = weakref.WeakKeyDictionary()

    def while_kept(self) -> Callable[..., Any]:
        """The backend, for Dynamo."""
        kept = weakref.ref(self)

        def memopt(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            here = kept()
            if here is None:
                raise RuntimeError(_GONE)
            function = _Function(here._backend(graph_module, example_inputs))
            call = _while_kept(weakref.ref(function))
            here._made[call] = function
            return call

        return memopt


class _Function:
    """What a backend has made of a graph."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run


def _while_kept(function: weakref.ref[_Function]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        here = function()
        if here is None:
            raise RuntimeError(_GONE)
        return here.run(*args)

    return call


# Where the functions lie that `torch.compile` puts around what it is called with, as `own_entry` does.
ENTRY_FILE = str(external_utils.__file__)

_GONE = "what compiled this function is gone"


def compiled_module(model: nn.Module, backend: Callable[..., Any], *, dynamic: bool | None) -> Any:
    """What `torch.compile` makes of a module, by what that does itself and nothing else.

    Who replaces `torch.compile` sees what memopt compiles as well: Lightning writes `_compile_kwargs` onto each module
    that is compiled, which is then among what the module holds and no longer to be pickled. Torch 2.13 itself writes
    `_is_torch_compile`, which it asks of functions alone. Tried on torch 2.11 and 2.13.

    Args:
        model: the module, on which nothing is written.
        backend: called with each graph that Dynamo makes of it, and that graph's inputs.
        dynamic: as in `torch.compile`.
    """
    optimized: Any = torch._dynamo.optimize(backend=backend, nopython=False, dynamic=dynamic)
    before = set(vars(model))
    made = optimized(model)
    for name in set(vars(model)) - before:
        del vars(model)[name]
    return made


def with_own_entry(compiled: Any) -> Any:
    """A module that `torch.compile` has made of one of torch's own, with an entry that no other shares.

    Dynamo looks at no frame of torch's files, and puts one of its own around such a module. All of them share that
    frame's code: what is given up in one (an LSTM, say) is never captured of any other. Here it is a copy of the code.
    Tried on torch 2.11 and 2.13.
    """
    model = compiled._orig_mod
    lazy, forward = hasattr(model, "_initialize_hook"), model.forward
    if lazy or not isinstance(forward, types.MethodType) or not is_passed_over(forward):
        return compiled
    compiled.forward = compiled.dynamo_ctx(own_entry(model))
    return compiled


def own_entry(function: Callable[..., Any]) -> types.FunctionType:
    """A function that calls this one, with code of its own in a file that Dynamo looks at; tried on 2.11 and 2.13."""
    shared: Any = external_utils.wrap_inline(function)
    code = shared.__code__.replace()
    return types.FunctionType(code, shared.__globals__, shared.__name__, shared.__defaults__, shared.__closure__)


def with_entries(forward: Callable[..., Any], entries: Mapping[int, Callable[..., Any]]) -> types.FunctionType:
    """A forward that calls a module's own entry: Dynamo does not look at it, but at the entry.

    Args:
        forward: which it takes the place of, and which modules have without an entry.
        entries: made by `own_entry`, by the `id` of the module.
    """

    def enters(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return entries.get(id(self), forward)(self, *args, **kwargs)

    code = enters.__code__.replace()  # torch marks the code, which all that are made here would share
    eval_frame.skip_code(code)
    own = types.FunctionType(code, enters.__globals__, enters.__name__, enters.__defaults__, enters.__closure__)
    functools.update_wrapper(own, forward)
    return own


def is_passed_over(function: Callable[..., Any]) -> bool:
    """Whether Dynamo never looks at this function's own frame, as it lies in a file of torch's."""
    return bool(trace_rules.check(function))


@contextlib.contextmanager
def functions_keep_backward() -> Iterator[None]:
    """Within, Dynamo breaks the graph at an `autograd.Function` whose backward it would lose under a transform.

    It would trace the function's forward alone there, since a tensor within `torch.vmap`, or one that `torch.func.grad`
    differentiates by, does not say that it requires a gradient, and the gradient of that: 0 for a straight-through
    estimator. What breaks is run as it is.
    Tried on torch 2.11 and 2.13; where Dynamo has no such method to stand before, nothing changes.
    """
    call_apply = _breaking_call_apply()
    with (
        contextlib.nullcontext() if call_apply is None else replaced(AutogradFunctionVariable, "call_apply", call_apply)
    ):
        yield


def keep_backward_of_functions() -> None:
    """What `functions_keep_backward` does, for good."""
    kind: Any = AutogradFunctionVariable
    call_apply = _breaking_call_apply()
    if call_apply is not None:
        kind.call_apply = call_apply


def _breaking_call_apply() -> Callable[..., Any] | None:
    kind: Any = AutogradFunctionVariable
    original = getattr(kind, "call_apply", None)
    if original is None:
        return None

    def call_apply(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if _loses_backward(args, kwargs):
            _break(f"{self.fn_cls.__name__}, an autograd.Function, is called under a transform of torch.func")
        return original(self, tx, *args, **kwargs)

    return call_apply


def _loses_backward(*operands: Any) -> bool:
    """Whether transforms are in force in which Dynamo drops the backward, or the jvp, of an `autograd.Function`."""
    functorch = torch._C._functorch
    stack = functorch.get_interpreter_stack() if functorch.maybe_current_level() is not None else None
    kinds, transforms = {interpreter.key() for interpreter in stack or ()}, functorch.TransformType
    if transforms.Jvp in kinds or not torch.is_grad_enabled():
        return transforms.Jvp in kinds
    return transforms.Vmap in kinds or (transforms.Grad in kinds and not _requires_gradient(operands))


def _requires_gradient(operands: Any) -> bool:
    """Whether Dynamo knows of a tensor among these variables that it requires a gradient."""
    found: list[bool] = []

    def visit(variable: Any) -> None:
        found.append(isinstance(variable, TensorVariable) and variable.requires_grad is not False)

    VariableTracker.visit(visit, operands)
    return any(found)


def _break(why: str) -> None:
    known: Any = exc.unimplemented
    if "gb_type" in inspect.signature(known).parameters:
        known(gb_type="autograd.Function under a transform", context="", explanation=why, hints=[])
    raise exc.Unsupported(why)


def waited_for_other_thread() -> bool:
    """Where torch says that it compiles, wait while that is in another thread; False where it is in this one.

    Torch says so to all threads, and while its tracer traces every module's call goes through it. A thread of autograd
    does not wait: the one that called backward may be compiling, and waits for it. Tried on torch 2.13.
    """
    lock: Any = convert_frame.compile_lock
    while torch.compiler.is_compiling():
        if lock._is_owned() or backward_task() != -1:
            return False
        if lock.acquire(blocking=False):
            lock.release()
            if torch.compiler.is_compiling():  # it traces without Dynamo
                return False
        else:
            with lock:
                pass
    return True


def dynamo_settings(**settings: Any) -> contextlib.AbstractContextManager[Any]:
    """Within: these settings of `torch._dynamo.config`; tried on torch 2.11 and 2.13."""
    patch: contextlib.AbstractContextManager[Any] = torch._dynamo.config.patch(**settings)
    return patch


# The setting by which what Dynamo compiles keeps no weak reference to a tensor, for which `torch.utils.swap_tensors`
# refuses it. Else it lets go of them for backends alone that are registered by their name, as memopt is where it is
# installed. Tried on torch 2.11 and 2.13; empty where there is no such setting.
_WEAK_REFERENCES_GO = "invalidate_compile_context_weakrefs"
NO_WEAK_REFERENCES = {_WEAK_REFERENCES_GO: True} if hasattr(torch._dynamo.config, _WEAK_REFERENCES_GO) else {}


def compilations() -> list[Any]:
    """Dynamo's compilations so far, the oldest left out when there are many: where each failed, and why.

    Tried on torch 2.11 and 2.13.
    """
    return list(utils.get_compilation_metrics())


def own_frames() -> tuple[str, str]:
    """The files of Dynamo's in whose frames it evaluates a function, and compiles one; tried on 2.11 and 2.13."""
    return str(eval_frame.__file__), str(convert_frame.__file__)
