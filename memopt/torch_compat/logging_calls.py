"""What a traced function logs, warns of or prints: written right after its graph has run, and no graph ends there.

Dynamo ends a graph at each such call (torch 2.11 to 2.13), or drops it where told to ignore the function; what it can
put off itself, it loses in functions that are traced through. Here a call is put off to the end of the frame that is
compiled. Elsewhere than under `deferred_logging`, and in other threads, tracing is as ever.
"""

from __future__ import annotations

import builtins
import contextlib
import contextvars
import functools
import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch._dynamo import disable, exc, source
from torch._dynamo.variables import base, constant, dicts, lists, misc, tensor

from memopt.common.scoped import scoped

_deferring = contextvars.ContextVar("deferring", default=False)
_silent = contextvars.ContextVar("silent", default=False)

_MODULE = tuple(
    getattr(logging, name) for name in ("debug", "info", "warning", "error", "critical", "exception", "log")
)
_FUNCTIONS = frozenset({builtins.print, warnings.warn, *_MODULE})


def deferred_logging() -> contextlib.AbstractContextManager[None]:
    """Within: loggers' methods, `logging.info` and so on, `warnings.warn` and `print` end no graph that is traced.

    They are called after the graph at each run of it, with the arguments of the run, in order; a warning names the
    line of the model. Tried on torch 2.13.
    """
    _install()
    return scoped(_deferring, True)


def silence() -> contextlib.AbstractContextManager[None]:
    """Within: what was put off is not written, as in a rehearsal on tensors without data."""
    return scoped(_silent, True)


@functools.cache
def _install() -> None:
    """Put the deferral before Dynamo's own ways, once in a process; it acts only under `deferred_logging`."""
    ours = misc.DebuggingVariable.is_reorderable_logging_function
    call_debugging, call_logger = misc.DebuggingVariable.call_function, misc.LoggingLoggerVariable.call_method

    def is_reorderable(obj: Any) -> Any:
        return (_deferring.get() and _among(obj)) or ours(obj)

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if not _deferring.get() or tx.export:
            return call_debugging(self, tx, args, kwargs)
        return _defer(tx, self.value, args, kwargs)

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        method = getattr(self.value, name, None)
        if not _deferring.get() or tx.export or not callable(method):
            return call_logger(self, tx, name, args, kwargs)
        if name in ("isEnabledFor", "getEffectiveLevel", "hasHandlers"):
            return constant.ConstantVariable.create(method(*[argument.as_python_constant() for argument in args]))
        if method in _ignored() or getattr(method, "__func__", None) in _ignored():
            return call_logger(self, tx, name, args, kwargs)
        return _defer(tx, method, args, kwargs)

    debugging: Any = misc.DebuggingVariable
    logger: Any = misc.LoggingLoggerVariable
    debugging.is_reorderable_logging_function = staticmethod(is_reorderable)
    debugging.call_function, logger.call_method = call_function, call_method


def _among(obj: Any) -> bool:
    try:
        return obj in _FUNCTIONS
    except TypeError:  # it has no hash
        return False


def _ignored() -> Any:
    """Functions that the user has told Dynamo to ignore; 2.11 knows loggers' methods alone."""
    from torch._dynamo import config

    return getattr(config, "ignore_logging_functions", None) or config.ignore_logger_methods


def _defer(tx: Any, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Put a call off to the end of the frame that is compiled; one that cannot be made there ends the graph."""
    names = list(kwargs)
    given = [*args, *kwargs.values()]
    values: list[Any] = [None] * len(given)  # of constants
    varying = []
    for index, argument in enumerate(given):
        argument = argument.realize()
        known, value = _constant(argument)
        if known:
            values[index] = value
        elif _is_available_at_end(argument):
            varying.append((index, argument))
        else:
            values[index] = f"<{argument.python_type_name()}>"  # one that exists while tracing alone
    place = _place(tx, function, values, names)
    written = _Deferred(function, values, tuple(index for index, _ in varying), names, place)
    write = disable(written.write)  # type: ignore[no-untyped-call]  # else Dynamo would trace what logging does
    root = tx.output.root_tx
    name = tx.output.install_global_by_id("__memopt_log", write)
    variable = misc.DebuggingVariable(write, source=source.GlobalSource(name))
    root.debug_locals.append((variable, [argument for _, argument in varying]))
    return constant.ConstantVariable.create(None)


class _Deferred:
    """A call of a logging function, with what was constant of its arguments."""

    def __init__(
        self,
        function: Callable[..., Any],
        values: list[Any],
        varying: tuple[int, ...],
        names: list[str],
        place: tuple[str, int, dict[str, Any]] | None,
    ) -> None:
        self._function, self._values, self._varying, self._names = function, values, varying, names
        self._place = place

    def write(self, *varying: Any) -> None:
        """Make the call, with the values of what varies; nothing where it is silent."""
        if _silent.get():
            return
        values = list(self._values)
        for index, value in zip(self._varying, varying, strict=True):
            values[index] = value
        count = len(values) - len(self._names)
        args, kwargs = values[:count], dict(zip(self._names, values[count:], strict=True))
        if self._place is None:
            self._function(*args, **kwargs)
            return
        file, line, registry = self._place
        named = {**dict(zip(("message", "category"), args, strict=False)), **kwargs}  # Python 3.12 tells no signature
        category = named.get("category") or UserWarning
        message = named["message"]
        if isinstance(message, Warning):
            category = type(message)
        module = registry.get("__name__")
        known = registry.setdefault("__warningregistry__", {})
        warnings.warn_explicit(message, category, file, line, module=module, registry=known)


def _place(
    tx: Any, function: Callable[..., Any], values: Sequence[Any], names: Sequence[str]
) -> tuple[str, int, dict[str, Any]] | None:
    """File, line and globals that a warning is to name; None for what is no warning."""
    if function is not warnings.warn:
        return None
    count = len(values) - len(names)
    level = dict(zip(names, values[count:], strict=True)).get("stacklevel", values[2] if count > 2 else 1)
    frame = tx
    for _ in range(level - 1 if isinstance(level, int) else 0):
        frame = getattr(frame, "parent", None) or frame
    return frame.f_code.co_filename, frame.lineno or frame.f_code.co_firstlineno, frame.f_globals


def _constant(argument: Any) -> tuple[bool, Any]:
    try:
        return True, argument.as_python_constant()
    except (NotImplementedError, exc.Unsupported):
        return False, None


def _is_available_at_end(argument: Any) -> bool:
    """Whether Dynamo can make the value again at the end of the frame."""
    if isinstance(argument, (tensor.TensorVariable, misc.StringFormatVariable)):
        return True
    if isinstance(argument, lists.BaseListVariable):
        return all(_is_available_at_end(item.realize()) or _constant(item)[0] for item in argument.items)
    if isinstance(argument, dicts.ConstDictVariable):
        return all(_is_available_at_end(item.realize()) or _constant(item)[0] for item in argument.items.values())
    return isinstance(argument, base.VariableTracker) and argument.source is not None
