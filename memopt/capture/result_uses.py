"""What a function's code does with the result of a call in it, as far as its bytecode proves that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any, NamedTuple

from memopt.capture.instructions import Code, Condition, Op

# What a loss is taken by: the name of an attribute or key, or the first place. Where branches do it in several ways,
# these are joined by `OR`.
ATTRIBUTE, KEY, FIRST, OR = "attribute", "key", "first", " or "
_RETURNED, _TESTED = "returned", "tested"
# Instructions that put the arguments of a call together, whose places are the whole call's.
_OF_ARGUMENTS = frozenset(
    [
        "PUSH_NULL",
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
# Functions that read variables by other means than their instructions; and names of such, of whatever object.
_READS_ALL = frozenset({"locals", "vars", "eval", "exec", "globals", "dir", "breakpoint"})
_READS_FRAMES = frozenset({"_getframe", "currentframe", "set_trace"})
_LOADS = ("LOAD_FAST", "LOAD_NAME", "LOAD_GLOBAL")
_MOST_CONDITIONS = 32  # of one function: each call of the model asks for them


class Site(NamedTuple):
    """A place in code where something is called.

    Attributes:
        use: what a loss is taken by of the result, where nothing else is; else empty.
        is_returned: whether the result is returned as it is, and nothing else is done with it.
    """

    use: str
    is_returned: bool


class Sites:
    """What becomes of the result of one call in a function's code, by the branches that are taken after it.

    Attributes:
        callee: the names that lead to what is called; none where they are not known.
        conditions: what decides the branches that matter.
        reads_all: whether the function may read any variable of its own by other means than instructions for it.
    """

    def __init__(self, code: CodeType, offset: int, of_script: bool = False) -> None:
        """Look at the code.

        Args:
            code: of the function.
            offset: of the call's instruction.
            of_script: whether it is a script's own, whose variables nobody reads but the script.
        """
        self._code = Code.of(code)
        self._call = self._code.position(offset)
        self._within = list(_within(code)) if of_script else []
        self.reads_all = any(map(_reads_all, [code, *self._within]))
        self._stores = {"STORE_FAST", "STORE_NAME"} if of_script else {"STORE_FAST"}
        self._known: dict[tuple[bool | None, ...], Site] = {}
        self.callee = _callee(self._code.ops[: self._call + 1])
        self.conditions: Sequence[Condition] = ()
        self._at_once = Site("", False) if self.reads_all else self._taken_at_once()
        if self._at_once is None and not any(self._by_branches(())):
            own = [name for name in code.co_varnames if name not in code.co_cellvars]
            found = self._code.conditions(self._call, own)
            self.conditions = found if len(found) <= _MOST_CONDITIONS else ()

    def site(self, jumps: tuple[bool | None, ...] = ()) -> Site:
        """What becomes of it where each of the conditions jumps or does not; None of one: that is not known."""
        known = self._known.get(jumps)
        if known is None:
            known = self._known[jumps] = self._at_once or self._by_branches(jumps)
        return known

    def _taken_at_once(self) -> Site | None:
        """What becomes of it where no variable holds it."""
        found = _consumed(self._code.ops, self._call + 1)
        return _site({found}) if found else None

    def _by_branches(self, jumps: Sequence[bool | None]) -> Site:
        ops, stored = self._code.ops, self._call + 1
        if stored >= len(ops) or ops[stored].name not in self._stores:
            return Site("", False)
        decided = {item.place: taken for item, taken in zip(self.conditions, jumps, strict=True) if taken is not None}
        within, name = self._code.behind(self._call, decided=decided), ops[stored].value
        if any(name in inner.co_names for inner in self._within):
            return Site("", False)
        loads = [place for place in within if ops[place].value == name and ops[place].name.startswith(_LOADS)]
        return _site({_consumed(ops, place + 1) or _tested(ops, place) for place in loads})


def _reads_all(code: CodeType) -> bool:
    if _READS_ALL.isdisjoint(code.co_names):
        return not _READS_FRAMES.isdisjoint(code.co_names)
    loads = {op.value for op in Code.of(code).ops if op.name in ("LOAD_GLOBAL", "LOAD_NAME")}  # not `model.eval()`
    return not (_READS_ALL.isdisjoint(loads) and _READS_FRAMES.isdisjoint(code.co_names))


def _within(code: CodeType) -> Iterator[CodeType]:
    """The code of functions and classes that are defined in some code."""
    for item in code.co_consts:
        if isinstance(item, CodeType):
            yield item
            yield from _within(item)


def _site(uses: set[str]) -> Site:
    found = uses - {_TESTED}
    if not found or "" in found:
        return Site("", False)
    if found == {_RETURNED}:
        return Site("", True)
    return Site("" if _RETURNED in found else OR.join(sorted(found)), False)


def _consumed(ops: Sequence[Op], place: int) -> str:
    """What instructions from a position on do with what lies on top of the stack, leaving nothing else; or empty."""
    names = [op.name for op in ops[place : place + 2]]
    if names[:1] == ["LOAD_ATTR"]:
        return ATTRIBUTE if ops[place].value == "loss" else ""
    if names == ["LOAD_CONST", "BINARY_SUBSCR"]:
        key = ops[place].value
        return KEY if key == "loss" else FIRST if type(key) is int and key == 0 else ""
    while [(op.name, op.value) for op in ops[place : place + 4]] == _LEAVES_BLOCK:
        place += 6
    return _RETURNED if [op.name for op in ops[place : place + 1]] == ["RETURN_VALUE"] else ""


# A block of `with` is left with a value on the stack: its end is called with three times None, and that result dropped.
_LEAVES_BLOCK = [("SWAP", 2), ("LOAD_CONST", None), ("LOAD_CONST", None), ("LOAD_CONST", None)]


def _tested(ops: Sequence[Op], place: int) -> str:
    """Whether a variable that is loaded at a position is only asked for its class, its keys, or whether it has one."""
    before, behind = ops[place - 1], ops[place + 1 : place + 3]
    if [(op.name, op.value) for op in behind] == [("LOAD_METHOD", "keys"), ("CALL", 0)]:
        return _TESTED
    if before.name == "LOAD_CONST" and [op.name for op in behind[:1]] == ["CONTAINS_OP"]:
        return _TESTED
    asks = before.name == "LOAD_GLOBAL" and before.value == "isinstance"
    return _TESTED if asks and [op.name for op in behind] == ["LOAD_GLOBAL", "CALL"] else ""


def _callee(ops: Sequence[Op]) -> tuple[str, ...]:
    """The names of what the last of these instructions calls, which begin where the call does; none where unknown."""
    if not ops or ops[-1].name != "CALL" or ops[-1].begins is None:
        return ()
    names: tuple[str, ...] = ()
    for op in ops[:-1]:
        if op.begins != ops[-1].begins:
            continue
        if op.name in ("LOAD_ATTR", "LOAD_METHOD"):
            names += (str(op.value),) if names else ()
        elif op.name not in _OF_ARGUMENTS:
            names = (op.value,) if op.name.startswith("LOAD_") and isinstance(op.value, str) else ()
    return names


def taken(outputs: Any, use: str) -> Any:
    """What a caller takes of a model's result; None where there is no such thing, or several."""
    found: list[Any] = []
    for way in use.split(OR):
        try:
            value = _TAKES[way](outputs)
        except Exception:  # whatever the user's class does
            continue
        found += [value] if all(value is not other for other in found) else []
    return found[0] if len(found) == 1 else None


_TAKES: Mapping[str, Callable[[Any], Any]] = {
    ATTRIBUTE: lambda outputs: outputs.loss,
    KEY: lambda outputs: outputs["loss"],
    FIRST: lambda outputs: outputs[0],
}
