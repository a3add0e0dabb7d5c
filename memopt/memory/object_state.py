"""What a model's code reaches beside its tensors and modules, to return to: objects, containers, streams of numbers.

A call that begins anew, or that is gone through on fake tensors first, runs Python code more often than the user's loop
does. What this writes to plain objects, containers, variables of functions and globals is set back, and so are
generators of random numbers and iterators that the user made.
"""

from __future__ import annotations

import collections
import dis
import functools
import itertools
import logging
import operator
import random
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from memopt.memory.attributes import is_object
from memopt.memory.module_attributes import FIXED, NUMBERS, ModuleAttributes, attributes_of
from memopt.torch_compat import pytree
from memopt.torch_compat.modules import modules_of

_MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
_NOT_ENTERED = (nn.Module, type, types.ModuleType, types.BuiltinFunctionType, logging.Logger)
# Classes of these packages are entered by other threads, or are no state of a model.
_OTHERS = frozenset({"torch", "memopt", "threading", "queue", "logging", "asyncio", "multiprocessing", "concurrent"})
_GONE = object()
_DEPTH, _MOST = 5, 10_000  # of objects in objects; of objects in all, and items of one container


class ObjectState:
    """What the code of a model reaches, as it is now.

    Attributes:
        tensors: those that objects and containers hold, but for attributes of modules.
    """

    def __init__(
        self, model: nn.Module, inputs: Any = (), attributes: Sequence[ModuleAttributes] | None = None
    ) -> None:
        """Look at what the model's modules, their hooks and methods reach, and at what it is called with.

        Args:
            model: whose code it is.
            inputs: what it is called with.
            attributes: of all of its modules; None: look for them.
        """
        self.tensors: list[torch.Tensor] = []
        self._seen: set[int] = set()
        self._contents: list[tuple[Any, list[Any]]] = []
        self._long: list[tuple[str, Any, int]] = []
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._variables: list[tuple[Callable[[Any], None], Callable[[], Any], Any]] = []
        self._streams: list[tuple[Any, Any]] = []
        self._iterators: list[tuple[Any, Any, Any, Iterator[Any]]] = []
        self._generators: list[tuple[str, types.GeneratorType[Any, Any, Any], Any]] = []
        kinds: dict[type, None] = {}
        for item in attributes_of(modules_of(model)) if attributes is None else attributes:
            kinds[item.kind] = None
            for key, value in item.others:
                if not isinstance(value, torch.Tensor):
                    self._look(item.held, key, value, _DEPTH)
            for key, hooks in item.hooks:
                if isinstance(hooks, dict) and not key.endswith("with_kwargs"):
                    for hook in list(hooks.values()):
                        self._look(None, key, hook, _DEPTH)
        for kind in kinds:
            for function in _methods(kind):
                self._function(function, _DEPTH)
        for leaf in pytree.tree_leaves(inputs):
            if not isinstance(leaf, torch.Tensor):
                self._look(None, "an input", leaf, _DEPTH)

    def restore(self) -> str:
        """Return to it: the same objects, with what they held.

        Returns:
            The name of what has changed and cannot be set back, or else empty.
        """
        for attributes, known in self._attributes:
            reset_attributes(attributes, known)
        for container, contents in self._contents:
            refill(container, contents)
        for put, get, value in self._variables:
            if get() is not value:
                put(value)
        for holder, key, iterator, copied in self._iterators:
            if holder[key] is iterator and not _is_there(iterator, copied):
                holder[key] = copied_iterator(copied)
        for stream, state in self._streams:
            _set_state(stream, state)
        changed = [key for key, value, length in self._long if len(value) != length]
        changed += [key for key, value, place in self._generators if _place(value) != place]
        return str(changed[0]) if changed else ""

    def _look(self, holder: Any, key: Any, value: Any, depth: int) -> None:
        if type(value) in FIXED or id(value) in self._seen or isinstance(value, _NOT_ENTERED):
            return
        if not depth or len(self._seen) >= _MOST:
            return
        self._seen.add(id(value))
        contents = contents_of(value)
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
        elif contents is not None:
            self._container(key, value, contents, depth)
        elif isinstance(value, tuple):
            for item in value[:_MOST]:
                self._look(None, key, item, depth - 1)
        elif isinstance(value, types.FunctionType):
            self._function(value, depth)
        elif isinstance(value, types.MethodType):
            self._look(None, key, value.__self__, depth)
        elif isinstance(value, functools.partial):
            for item in (value.func, *value.args, *value.keywords.values()):
                self._look(None, key, item, depth)
        elif (state := _state(value)) is not None:
            self._streams.append((value, state))
        elif isinstance(value, types.GeneratorType):
            self._generators.append((key, value, _place(value)))
        elif is_object(value):
            self._object(value, depth)
        elif holder is not None and hasattr(type(value), "__next__"):
            try:
                self._iterators.append((holder, key, value, copied_iterator(value)))
            except (TypeError, AttributeError):  # a file, say
                return

    def _container(self, key: Any, value: Any, contents: list[Any], depth: int) -> None:
        if len(contents) > _MOST:
            self._long.append((key, value, len(contents)))
            return
        self._contents.append((value, contents))
        items: Iterable[tuple[Any, Any]] = contents if isinstance(value, dict) else enumerate(contents)
        holder = None if isinstance(value, set) else value
        for place, item in items:
            if type(item) not in FIXED:
                self._look(holder, place, item, depth - 1)

    def _object(self, value: Any, depth: int) -> None:
        if type(value).__module__.partition(".")[0] in _OTHERS:
            return
        attributes = vars(value)
        self._attributes.append((attributes, dict(attributes)))
        for key, item in list(attributes.items()):
            if type(item) not in FIXED:
                self._look(attributes, key, item, depth - 1)

    def _function(self, function: types.FunctionType, depth: int) -> None:
        if function.__module__ is None or function.__module__.partition(".")[0] in _OTHERS:
            return
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # it was never filled
                continue
            put, get = functools.partial(setattr, cell, "cell_contents"), functools.partial(_content, cell)
            if type(content) in NUMBERS:
                self._variables.append((put, get, content))
            else:
                self._look(None, "a variable", content, depth - 1)
        known = function.__globals__
        for name, written in _globals(function.__code__):
            value = known.get(name)
            if type(value) in NUMBERS:
                if written:
                    put = functools.partial(operator.setitem, known, name)
                    self._variables.append((put, functools.partial(known.get, name), value))
            elif not isinstance(value, types.FunctionType) or value.__globals__ is known:
                self._look(known, name, value, depth - 1)


def contents_of(value: Any) -> list[Any] | None:
    """What a list, a dictionary, a set or a queue holds; None of anything else."""
    if type(value) in _MAPPINGS:
        return list(value.items())
    return list(value) if type(value) in (list, set, collections.deque) else None


def refill(value: Any, contents: list[Any]) -> None:
    """Have a list, a dictionary, a set or a queue hold that, where it holds anything else."""
    held = contents_of(value) or []
    if len(held) == len(contents) and all(
        a is b or (isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b) and all(map(operator.is_, a, b)))
        for a, b in zip(held, contents, strict=True)
    ):
        return
    value.clear()
    if isinstance(value, dict):
        for key, item in contents:  # a Counter's `update` would count
            value[key] = item
    else:
        value.update(contents) if isinstance(value, set) else value.extend(contents)


def reset_attributes(attributes: dict[str, Any], known: dict[str, Any]) -> None:
    """Have an object's attributes be the known ones again, the same values; what has not changed is not written."""
    for key in attributes.keys() - known.keys():
        del attributes[key]
    for key, value in known.items():
        if attributes.get(key, _GONE) is not value:
            attributes[key] = value


def copied_iterator(iterator: Iterator[Any]) -> Iterator[Any]:
    """An iterator at the same place over the same items.

    Raises:
        TypeError: it cannot be copied.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.14 copies no `itertools`
        described: Any = iterator.__reduce__()
        made, given, *state = described
        copied = made(*(copied_iterator(item) if hasattr(type(item), "__next__") else item for item in given))
        if state and state[0] is not None:
            parts = state[0]
            own = tuple(list(part) if type(part) is list else part for part in parts) if type(parts) is tuple else parts
            copied.__setstate__(own)
    return copied  # type: ignore[no-any-return]


def _is_there(iterator: Any, copied: Any) -> bool:
    """Whether an iterator, or a part of what describes one, is where its copy is."""
    if hasattr(type(iterator), "__next__"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return _is_there(iterator.__reduce__()[1:], copied.__reduce__()[1:])
    if type(iterator) is tuple:
        return len(iterator) == len(copied) and all(map(_is_there, iterator, copied))
    if type(iterator) in NUMBERS:
        return bool(iterator == copied)
    return iterator is copied or (type(iterator) is list and len(iterator) == len(copied))


# -- streams of random numbers ---------------------------------------------------------------------------------------


def _state(value: Any) -> Any:
    """Where a generator of random numbers is; None of anything else."""
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return bytes(state.tolist())  # no tensor, which would take a part of a budget
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    return None


def _set_state(value: Any, state: Any) -> None:
    if isinstance(value, torch.Generator):
        value.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(value, random.Random):
        value.setstate(state)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = state
    else:
        value.set_state(state)


def _place(generator: types.GeneratorType[Any, Any, Any]) -> Any:
    """Where a function that yields has stopped: it can neither be copied nor set back."""
    frame = generator.gi_frame
    if frame is None:
        return None
    numbers = {name: value for name, value in frame.f_locals.items() if type(value) in NUMBERS}
    inner = [value.__reduce__()[2:] for value in frame.f_locals.values() if type(value) in _COUNTED]
    return frame.f_lasti, numbers, inner


_COUNTED: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter(range(0))))


# -- code ------------------------------------------------------------------------------------------------------------


@functools.cache
def _methods(kind: type) -> tuple[types.FunctionType, ...]:
    """The functions of a user's class that forward may call, as they are written."""
    own: dict[str, list[types.FunctionType]] = {}
    for each in kind.__mro__:
        if each.__module__.partition(".")[0] not in _OTHERS | {"builtins"}:
            for name, value in vars(each).items():
                if isinstance(plain := _unwrapped(value), types.FunctionType):
                    own.setdefault(name, []).append(plain)
    found, names = list[types.FunctionType](), ["forward", "__call__"]
    for name in names:
        for function in own.pop(name, ()):
            found.append(function)
            names += _names(function.__code__)
    return tuple(found)


def _names(code: types.CodeType) -> list[str]:
    inner = [_names(part) for part in code.co_consts if isinstance(part, types.CodeType)]
    return [*code.co_names, *itertools.chain.from_iterable(inner)]


_WITHIN = ("__wrapped__", "__func__", "fget")  # of what decorators, class methods and properties make


def _unwrapped(value: Any) -> Any:
    while True:
        inner = next((inner for name in _WITHIN if (inner := getattr(value, name, None)) is not None), None)
        if inner is None:
            return value
        value = inner


@functools.cache
def _globals(code: types.CodeType) -> tuple[tuple[str, bool], ...]:
    """Names of the globals that a function reads, and whether it writes to them."""
    read: dict[str, bool] = {}
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "STORE_GLOBAL"):
            name = str(step.argval)
            read[name] = read.get(name, False) or step.opname == "STORE_GLOBAL"
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            for name, written in _globals(part):
                read[name] = read.get(name, False) or written
    return tuple(read.items())


def _content(cell: types.CellType) -> Any:
    return cell.cell_contents
