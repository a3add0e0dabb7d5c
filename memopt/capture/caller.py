"""What becomes of the result of the model's call that runs, in the functions that it goes through on its way up.

`loss = model(**batch).loss` can use nothing else of what the model returns, nor can `out = model(**batch)` where all
that the function does with `out` is `out.loss`. A function between that returns the result as it is passes the
question on to its own caller. Every function must call the next one itself: of what C code between does with the
result (`map`, `functools.lru_cache`) nothing is known.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn

from memopt.capture.instructions import Condition
from memopt.capture.result_uses import Site, Sites
from memopt.torch_compat.modules import calls_hooks, calls_module, hooks_behind

# Whose `forward` the caller calls.
_STAND_IN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "module.py")
# Functions of libraries, by module and name, that return what they call returns, and when, by their `self`. What comes
# of accelerate's is of another precision; DistributedDataParallel looks at outputs for parameters that are not used.
_PASSES_ON: Mapping[tuple[str, str], Callable[[Any], bool]] = {
    ("accelerate.utils.operations", "ConvertOutputsToFp32.__call__"): lambda own: True,
    ("torch.nn.parallel.distributed", "DistributedDataParallel.forward"): (
        lambda own: not (own.find_unused_parameters or own.static_graph)
    ),
}
_LIBRARIES = ("torch", "accelerate", "memopt")
_CALLS_AGAIN = "torch.utils.checkpoint"  # in backward, from elsewhere, where it must be the same plan that runs
_READ, _UNSET = vars(object)["__getattribute__"], object()
_UNSHARED = 3  # references to a frame's dictionary: its own, a variable's, and that of who counts
_MOST_FUNCTIONS = 32  # on the way up; Python's own stack may be a thousand deep


class LossAlone(NamedTuple):
    """A caller that takes a loss of what a call returns, and nothing else.

    Attributes:
        use: what it takes that by, as in `memopt.capture.result_uses`.
        file, line: where.
    """

    use: str
    file: str
    line: int

    @property
    def place(self) -> str:
        """Where, as "file:line", without folders."""
        return f"{os.path.basename(self.file)}:{self.line}"


def takes_loss_alone() -> LossAlone | None:
    """How the caller of the model that runs takes a loss of what it returns; None where it may do more with it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename != _STAND_IN:
        frame = frame.f_back
    called: CodeType | nn.Module | None = None
    while frame is not None and frame.f_code.co_filename == _STAND_IN:
        called, frame = frame.f_code, frame.f_back
    straight = True  # whether no code of a user's runs before a function goes on, which might set attributes
    for _ in range(_MOST_FUNCTIONS):
        if frame is None or frame.f_globals.get("__name__") == _CALLS_AGAIN:
            return None
        sites = _sites(frame)
        if sites.reads_all:  # what it has of its variables is the very dictionary that a frame shows
            return None
        of_torch = calls_module(frame)  # it does more with the result where there are hooks
        if not (of_torch and isinstance(called, nn.Module)) and not _leads_to(_named(sites.callee, frame), called):
            return None
        site = _site(sites, frame, straight)
        if site.use:
            return LossAlone(site.use, frame.f_code.co_filename, frame.f_lineno)
        if not site.is_returned and not _passes_on(frame) and not _calls_own_hooks(frame):
            return None
        called = _variable("self", frame) if of_torch else frame.f_code
        straight &= _of_library(frame)
        frame = frame.f_back
    return None


# By code, which it holds, and place: each call of the model asks again.
_KNOWN: dict[tuple[int, int], tuple[CodeType, Sites]] = {}
_MOST = 4096


def _sites(frame: FrameType) -> Sites:
    code, place = frame.f_code, frame.f_lasti
    known = _KNOWN.get((id(code), place))
    if known is None:
        if len(_KNOWN) >= _MOST:
            _KNOWN.clear()
        known = _KNOWN[id(code), place] = code, Sites(code, place, _is_script(frame))
    return known[1]


def _is_script(frame: FrameType) -> bool:
    """Whether a frame is of the file that Python runs, whose variables are gone with it: at a prompt they are not."""
    prompt = hasattr(sys, "ps1") or sys.flags.interactive or sys.flags.inspect
    if frame.f_back is not None or frame.f_code.co_name != "<module>" or prompt:
        return False
    names = frame.f_globals
    return names.get("__name__") == "__main__" and names.get("__file__") == frame.f_code.co_filename


def _of_library(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _LIBRARIES


def _site(sites: Sites, frame: FrameType, straight: bool = True) -> Site:
    """What becomes of a call's result; attributes are asked where code went `straight` on from the model to here."""
    jumps: list[bool | None] = []
    for item in sites.conditions:
        of_attribute = len(item.names) > 1
        jumps.append(None if of_attribute and not straight else _jumps(item, frame))
        straight &= not (of_attribute and jumps[-1] is None)  # what it asks may be code that sets others
    return sites.site(tuple(jumps))


def _jumps(condition: Condition, frame: FrameType) -> bool | None:
    """Whether code jumps by what a function's variables are now; None where that takes code of a user's.

    Of modules no attribute is asked: the model that runs may count its calls.
    """
    first, *others = condition.names
    value = _local(first, frame, _UNSET)
    if value is _UNSET:
        return None
    for name in others:
        of_class, own = _of_class(type(value), name), getattr(value, "__dict__", {})
        reads = _of_class(type(value), "__getattribute__") is _READ and not isinstance(value, nn.Module)
        if not reads or hasattr(type(of_class), "__set__"):
            return None
        if name not in own and (of_class is _UNSET or hasattr(type(of_class), "__get__")):
            return None
        value = own.get(name, of_class)
    return condition.jumps(value)


def _of_class(kind: type, name: str) -> Any:
    """An attribute of a class as it lies there; `_UNSET` where it has none."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), _UNSET)


def _leads_to(found: Any, called: CodeType | nn.Module | None) -> bool:
    """Whether calling an object calls this module, or a function with this code, with nothing between."""
    if found is None or called is None or found is called:
        return found is not None and called is not None
    function = found.__func__ if isinstance(found, MethodType) else found
    if not isinstance(function, FunctionType):
        function = inspect.getattr_static(type(found), "__call__", None)
    return isinstance(function, FunctionType) and function.__code__ is called


def _passes_on(frame: FrameType) -> bool:
    """Whether a frame is of a library's function that returns what it gets, though its code does not tell."""
    name = getattr(frame.f_code, "co_qualname", "")  # Python 3.10 has none
    passes = _PASSES_ON.get((frame.f_globals.get("__name__", ""), name))
    return passes is not None and passes(_variable("self", frame))


def _calls_own_hooks(frame: FrameType) -> bool:
    """Whether a frame is torch's own that gives a result to no hooks but the stand-in's, which do not look at it."""
    return calls_hooks(frame) and all(_of_stand_in(hook) for hook in hooks_behind(_variable("self", frame)))


def _of_stand_in(function: Any) -> bool:
    return isinstance(function, FunctionType) and function.__code__.co_filename == _STAND_IN


def _named(names: tuple[str, ...], frame: FrameType) -> Any:
    """The object that a function calls by a variable's name and names of attributes; None where it is not found."""
    if not names:
        return None
    first, *others = names
    found = _variable(first, frame)
    for name in others:
        found = _attribute(found, name)
    return found


def _attribute(found: Any, name: str) -> Any:
    """An object's own attribute, its module, or a method as a function, of a name; None where there is none."""
    own = getattr(found, "__dict__", {})
    if name in own:
        return own[name]
    if isinstance(found, nn.Module):
        part = next((part for key, part in found.named_children() if key == name), None)
        if part is not None:
            return part
    method = _of_class(type(found), name)
    return method if isinstance(method, FunctionType) else None


def _variable(name: str, frame: FrameType) -> Any:
    """The value of a variable as a function sees it; a script's own are its globals."""
    code = frame.f_code
    if name not in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
        return frame.f_globals.get(name)
    return _local(name, frame, None)


def _local(name: str, frame: FrameType, default: Any) -> Any:
    """The value of a function's own variable; `default` where it has none."""
    values = frame.f_locals
    found = values.get(name, default)
    # Before Python 3.13 it is a copy that the frame keeps: what the caller deletes would stay. Others may have it, too.
    if (
        isinstance(values, dict)
        and frame.f_code.co_flags & inspect.CO_OPTIMIZED
        and sys.getrefcount(values) <= _UNSHARED
    ):
        values.clear()
    return found
