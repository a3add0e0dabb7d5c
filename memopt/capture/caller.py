"""What the caller's code does with the result of the call that runs, as far as its bytecode proves it.

`loss = model(**batch).loss` can use nothing else of what the model returns, nor can `out = model(**batch)` where all
that the function does with `out` is `out.loss`. Then the loss alone has a gradient: known before the first step.
"""

from __future__ import annotations

import dis
import enum
import os
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

# Whose `forward` the caller calls.
_STAND_IN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "module.py")
# The name of a loss in what a model returns, and its place.
_LOSS = "loss", 0
# Instructions that do nothing to what was returned.
_NOTHING = {"CACHE", "NOP", "EXTENDED_ARG", "RESUME", "NOT_TAKEN"}


def takes_loss_alone() -> str:
    """Where the caller of the model that runs takes a loss of what it returns, and nothing else: "file:line".

    Returns:
        The place; empty where the code does more with it, or that is not seen.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename != _STAND_IN:
        frame = frame.f_back
    while frame is not None and frame.f_code.co_filename == _STAND_IN:
        frame = frame.f_back
    while frame is not None:
        use = _use(frame.f_code, frame.f_lasti)
        if use is _Use.LOSS:
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        if use is _Use.MORE:
            return ""
        frame = frame.f_back
    return ""


class _Use(enum.Enum):
    """What becomes of a call's result."""

    LOSS, PASSED_ON, MORE = "a loss is taken of it", "it is returned", "anything else"


# By code, which it holds, and place: each call of the model asks again.
_KNOWN: dict[tuple[int, int], tuple[CodeType, _Use]] = {}
_MOST = 4096


def _use(code: CodeType, place: int) -> _Use:
    known = _KNOWN.get((id(code), place))
    if known is None:
        use = _Use.PASSED_ON if _is_returned(code, place) and _is_passage(code) else _Use.MORE
        use = _Use.LOSS if _is_taken_alone(code, place) else use
        if len(_KNOWN) >= _MOST:
            _KNOWN.clear()
        known = _KNOWN[id(code), place] = code, use
    return known[1]


def _is_passage(code: CodeType) -> bool:
    """Whether what a function returns reaches its caller alone: a generator's or a coroutine's goes elsewhere."""
    flags = dis.COMPILER_FLAG_NAMES
    return not any(
        name in ("GENERATOR", "COROUTINE", "ASYNC_GENERATOR") and code.co_flags & bit for bit, name in flags.items()
    )


def _instructions(code: CodeType) -> list[dis.Instruction]:
    return [item for item in dis.get_instructions(code) if item.opname not in _NOTHING]


def _after(code: CodeType, place: int) -> list[dis.Instruction]:
    """The instructions behind the one at a place."""
    return [item for item in _instructions(code) if item.offset > place]


def _is_returned(code: CodeType, place: int) -> bool:
    following = _after(code, place)
    return bool(following) and following[0].opname == "RETURN_VALUE"


def _is_taken_alone(code: CodeType, place: int) -> bool:
    """Whether a call at this place of a function's code is one of whose result only the loss is taken."""
    following = _after(code, place)
    if _is_loss(following):
        return True
    if not following:
        return False
    store, names = following[0], _names(following[0])
    if not store.opname.startswith("STORE_") or not names:
        return False
    name = names[0]
    if store.opname.startswith("STORE_FAST"):
        if len(names) > 1 and not store.opname.startswith("STORE_FAST_LOAD_FAST"):
            return False  # of two values on the stack, the first one is the call's
        return all(_is_loss(rest) for rest in _behind_loads(code, name, "_FAST"))
    if store.opname == "STORE_NAME" and code.co_name == "<module>":
        inner = any(name in each.co_names for each in _nested(code))
        return not inner and all(_is_loss(rest) for rest in _behind_loads(code, name, "_NAME"))
    return False


def _names(instruction: dis.Instruction) -> tuple[str, ...]:
    """The variables of an instruction; newer Pythons have some for two."""
    value: Any = instruction.argval
    if isinstance(value, tuple):
        return tuple(map(str, value))
    return (value,) if isinstance(value, str) else ()


def _behind_loads(code: CodeType, name: str, kind: str) -> Iterator[list[dis.Instruction]]:
    """What follows where a variable is loaded; nothing, which is no loss, where it is loaded with another behind it."""
    every = _instructions(code)
    for place, item in enumerate(every):
        if item.opname.startswith("DELETE_") or kind not in item.opname or "LOAD" not in item.opname:
            continue
        names = _names(item)
        loaded = names[1:] if item.opname.startswith("STORE_FAST_LOAD_FAST") else names
        if name in loaded:
            yield every[place + 1 :] if loaded[-1] == name and loaded.count(name) == 1 else []


def _is_loss(following: list[dis.Instruction]) -> bool:
    """Whether the first of these instructions take a loss of what lies on the stack, and leave nothing else of it."""
    if not following:
        return False
    first = following[0]
    if first.opname == "LOAD_ATTR":
        return first.argval in _LOSS and "NULL" not in first.argrepr
    if len(following) < 2 or first.opname not in ("LOAD_CONST", "LOAD_SMALL_INT"):
        return False
    subscript = following[1].opname == "BINARY_SUBSCR" or (
        following[1].opname == "BINARY_OP" and following[1].argrepr == "[]"
    )
    return subscript and type(first.argval) in (str, int) and first.argval in _LOSS


def _nested(code: CodeType) -> Iterator[CodeType]:
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield value
            yield from _nested(value)
