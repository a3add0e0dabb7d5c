"""What the caller's code does with the result of the call that runs, as far as its bytecode proves it.

`loss = model(**batch).loss` can use nothing else of what the model returns, nor can `out = model(**batch)` where all
that the function does with `out` is `out.loss`. The call must be one of the stand-in itself: of a function between, in
C perhaps, it is not known what else it does with the result.
"""

from __future__ import annotations

import dis
import os
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

from torch import nn

from memopt.torch_compat.modules import calls_module

# Whose `forward` the caller calls.
_STAND_IN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "module.py")
# What a loss is taken by: the name of an attribute or key, or the first place.
ATTRIBUTE, KEY, FIRST = "attribute", "key", "first"
# Instructions that do nothing to what was returned.
_NOTHING = {"CACHE", "NOP", "EXTENDED_ARG", "RESUME", "NOT_TAKEN"}
# Instructions that put the arguments of a call together, whose places are the whole call's.
_OF_ARGUMENTS = frozenset(
    [
        "PUSH_NULL",
        "PRECALL",
        "KW_NAMES",
        "LOAD_CONST",
        "BUILD_MAP",
        "BUILD_TUPLE",
        "BUILD_LIST",
        "DICT_MERGE",
        "DICT_UPDATE",
        "LIST_EXTEND",
        "LIST_APPEND",
        "LIST_TO_TUPLE",
        "CALL_INTRINSIC_1",
        "BUILD_CONST_KEY_MAP",
    ]
)
# Functions that read variables by other means than their instructions.
_READS_ALL = frozenset({"locals", "vars", "eval", "exec", "globals", "dir", "_getframe", "currentframe", "breakpoint"})


class LossAlone(NamedTuple):
    """A caller that takes a loss of what a call returns, and nothing else.

    Attributes:
        use: what it takes that by: `ATTRIBUTE`, `KEY` or `FIRST`.
        file, line: where.
    """

    use: str
    file: str
    line: int

    @property
    def place(self) -> str:
        """Where, as "file:line", without folders."""
        return f"{os.path.basename(self.file)}:{self.line}"


class _Site(NamedTuple):
    """A place in code where something is called.

    Attributes:
        use: what a loss is taken by of the result, where nothing else is; else empty.
        callee: the names that lead to what is called; none where they are not known, or do not matter.
        is_returned: whether the result is returned as it is.
    """

    use: str
    callee: tuple[str, ...]
    is_returned: bool


def takes_loss_alone() -> LossAlone | None:
    """How the caller of the model that runs takes a loss of what it returns; None where it may do more with it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename != _STAND_IN:
        frame = frame.f_back
    stand_in = None
    while frame is not None and frame.f_code.co_filename == _STAND_IN:
        stand_in, frame = frame.f_locals.get("self", stand_in), frame.f_back
    while frame is not None and calls_module(frame):  # it does more with the result where there are hooks
        if frame.f_locals["self"] is not stand_in or not _site(frame.f_code, frame.f_lasti).is_returned:
            return None
        frame = frame.f_back
    if frame is None or stand_in is None:
        return None
    site = _site(frame.f_code, frame.f_lasti)
    if not site.use or _named(site.callee, frame) is not stand_in:
        return None
    return LossAlone(site.use, frame.f_code.co_filename, frame.f_lineno)


def taken(outputs: Any, use: str) -> Any:
    """What a caller takes of a model's result; None where there is no such thing."""
    try:
        return outputs.loss if use == ATTRIBUTE else outputs["loss"] if use == KEY else outputs[0]
    except Exception:  # whatever the user's class does
        return None


# By code, which it holds, and place: each call of the model asks again.
_KNOWN: dict[tuple[int, int], tuple[CodeType, _Site]] = {}
_MOST = 4096


def _site(code: CodeType, place: int) -> _Site:
    known = _KNOWN.get((id(code), place))
    if known is None:
        if len(_KNOWN) >= _MOST:
            _KNOWN.clear()
        use, following = _use(code, place), _after(code, place)
        is_returned = bool(following) and following[0].opname == "RETURN_VALUE"
        known = _KNOWN[id(code), place] = code, _Site(use, _callee(code, place) if use else (), is_returned)
    return known[1]


def _named(names: tuple[str, ...], frame: FrameType) -> Any:
    """The object that a function calls by a variable's name and names of attributes; None where it is not found."""
    if not names:
        return None
    first, *others = names
    found = _variable(first, frame)
    for name in others:
        attributes = getattr(found, "__dict__", {})
        parts = found.named_children() if isinstance(found, nn.Module) else ()
        found = attributes.get(name) if name in attributes else next((part for key, part in parts if key == name), None)
    return found


def _variable(name: str, frame: FrameType) -> Any:
    """The value of a variable as a function sees it; a script's own are its globals."""
    code = frame.f_code
    if name not in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
        return frame.f_globals.get(name)
    values = frame.f_locals
    found = values.get(name)
    if isinstance(values, dict):  # before Python 3.13 a copy that the frame keeps: what the caller deletes would stay
        values.clear()
    return found


def _instructions(code: CodeType) -> list[dis.Instruction]:
    return [item for item in dis.get_instructions(code) if item.opname not in _NOTHING]


def _after(code: CodeType, place: int) -> list[dis.Instruction]:
    """The instructions behind the one at a place."""
    return [item for item in _instructions(code) if item.offset > place]


def _callee(code: CodeType, place: int) -> tuple[str, ...]:
    """The names of what is called at a place, which begin where the call does; none where code has no such places."""
    every = _instructions(code)
    call = next((item for item in every if item.offset == place), None)
    positions: Any = getattr(call, "positions", None)
    if call is None or not call.opname.startswith("CALL") or positions is None or positions.lineno is None:
        return ()
    names: tuple[str, ...] = ()
    for item in every:
        at: Any = getattr(item, "positions", None)
        if item.offset >= place:
            break
        if at is None or (at.lineno, at.col_offset) != (positions.lineno, positions.col_offset):
            continue
        if item.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            names += (str(item.argval),) if names else ()
        elif item.opname not in _OF_ARGUMENTS:
            names = (item.argval,) if item.opname.startswith("LOAD_") and isinstance(item.argval, str) else ()
    return names


def _use(code: CodeType, place: int) -> str:
    """What a call at this place of a function's code has a loss taken by, where nothing else is; else empty."""
    following = _after(code, place)
    if not following or not _READS_ALL.isdisjoint(code.co_names):
        return ""
    if _loss_by(following):
        return _loss_by(following)
    store, names = following[0], _names(following[0])
    if not store.opname.startswith("STORE_FAST") or not names:
        return ""
    if len(names) > 1 and not store.opname.startswith("STORE_FAST_LOAD_FAST"):
        return ""  # of two values on the stack, the first one is the call's
    uses = {_loss_by(rest) for rest in _behind_loads(code, names[0])}
    return uses.pop() if len(uses) == 1 else ""


def _names(instruction: dis.Instruction) -> tuple[str, ...]:
    """The variables of an instruction; newer Pythons have some for two."""
    value: Any = instruction.argval
    if isinstance(value, tuple):
        return tuple(map(str, value))
    return (value,) if isinstance(value, str) else ()


def _behind_loads(code: CodeType, name: str) -> Iterator[list[dis.Instruction]]:
    """What follows where a variable is loaded; nothing, which is no loss, where it is loaded with another behind it."""
    every = _instructions(code)
    for place, item in enumerate(every):
        if item.opname.startswith("DELETE_") or "_FAST" not in item.opname or "LOAD" not in item.opname:
            continue
        names = _names(item)
        loaded = names[1:] if item.opname.startswith("STORE_FAST_LOAD_FAST") else names
        if name in loaded:
            yield every[place + 1 :] if loaded[-1] == name and loaded.count(name) == 1 else []


def _loss_by(following: list[dis.Instruction]) -> str:
    """What the first of these instructions take a loss by of what lies on the stack, leaving nothing else; or empty."""
    if not following:
        return ""
    first = following[0]
    if first.opname == "LOAD_ATTR":
        return ATTRIBUTE if first.argval == "loss" and "NULL" not in first.argrepr else ""
    if len(following) < 2 or first.opname not in ("LOAD_CONST", "LOAD_SMALL_INT"):
        return ""
    subscript = following[1].opname == "BINARY_SUBSCR" or (
        following[1].opname == "BINARY_OP" and following[1].argrepr == "[]"
    )
    if not subscript:
        return ""
    return KEY if first.argval == "loss" else FIRST if type(first.argval) is int and first.argval == 0 else ""
