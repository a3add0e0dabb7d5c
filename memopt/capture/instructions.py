"""A function's bytecode in the form that all Python versions from 3.11 to 3.13 share, and which of it can still run."""

from __future__ import annotations

import bisect
import dataclasses
import dis
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any, NamedTuple

# Instructions that do nothing to what lies on the stack.
_NOTHING = frozenset({"CACHE", "NOP", "EXTENDED_ARG", "RESUME", "NOT_TAKEN", "PRECALL", "KW_NAMES", "TO_BOOL"})
# Newer names of instructions, by what they begin with; variables that may be unset, or are borrowed, are alike.
_NAMES = {"LOAD_FAST_": "LOAD_FAST", "LOAD_SMALL_INT": "LOAD_CONST", "CALL_": "CALL"}
# Names that begin so and are something else.
_OTHERS = frozenset({"LOAD_FAST_AND_CLEAR", "CALL_INTRINSIC_1", "CALL_INTRINSIC_2"})
_LEAVES = frozenset({"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"})
# What decides a jump, by the end of its name; whether it jumps, of the value that it looks at.
_DECIDES: Mapping[str, Callable[[Any], bool]] = {
    "_IF_NONE": lambda value: value is None,
    "_IF_NOT_NONE": lambda value: value is not None,
    "_IF_FALSE": lambda value: not value,
    "_IF_TRUE": lambda value: bool(value),
}
_COMPARES: Mapping[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    ">=": operator.ge,
}
# What runs no code of a user's, beside loading attributes.
_RUNS_NOTHING = ("LOAD_FAST", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_CONST", "STORE_FAST", "JUMP_", "POP_TOP")
_PLAIN = (bool, int, float, str, type(None))  # whose comparisons run no code of a user's


class Op(NamedTuple):
    """An instruction.

    Attributes:
        name: what it does, by its name in Python 3.11 or that of `_NAMES`.
        value: its variable, attribute, constant or the like.
        offset: where it lies in the code.
        target: where it may jump to; None where it does not.
        begins: line and column at which what it belongs to begins in the source; None where that is not known.
    """

    name: str
    value: Any
    offset: int
    target: int | None
    begins: tuple[int, int] | None


class Condition(NamedTuple):
    """What decides a jump.

    Attributes:
        place: the jump, by its position among the instructions.
        names: a variable of the function and attributes of it, that lead to the value.
        compares: what is asked of the value, and with what; None: whether it is true, or None.
        decides: whether it jumps, by the answer.
    """

    place: int
    names: tuple[str, ...]
    compares: tuple[Callable[[Any, Any], Any], Any] | None
    decides: Callable[[Any], bool]

    def jumps(self, value: Any) -> bool | None:
        """Whether it jumps where the names lead to this value; None where that is not known without running code."""
        if self.compares is not None:
            if not isinstance(value, _PLAIN) or not isinstance(self.compares[1], _PLAIN):
                return None
            try:
                value = self.compares[0](value, self.compares[1])
            except TypeError:
                return None
        of_none = self.decides in (_DECIDES["_IF_NONE"], _DECIDES["_IF_NOT_NONE"])
        return self.decides(value) if of_none or isinstance(value, _PLAIN) else None


@dataclasses.dataclass(frozen=True)
class Code:
    """The instructions of a function.

    Attributes:
        ops: in order.
        at: the position of the first instruction at or behind an offset that is jumped to, by the offset.
        starts: those positions, which are more than a jump's: where errors begin and end to be handled as well.
        handlers: where errors are handled: the first and last position of what raises them, and that of the handler.
    """

    ops: Sequence[Op]
    at: Mapping[int, int]
    starts: frozenset[int]
    handlers: Sequence[tuple[int, int, int]]

    @staticmethod
    def of(code: CodeType) -> Code:
        """Those of a code object."""
        ops = [op for item in dis.get_instructions(code) for op in _simple(item)]
        entries: Sequence[Any] = getattr(dis.Bytecode(code), "exception_entries", None) or ()
        wanted = {op.target for op in ops if op.target is not None}
        wanted |= {offset for entry in entries for offset in (entry.start, entry.end, entry.target)}
        offsets = [op.offset for op in ops]
        at = {offset: bisect.bisect_left(offsets, offset) for offset in wanted}
        handlers = [(at[entry.start], at[entry.end], at[entry.target]) for entry in entries]
        return Code(ops, at, frozenset(at.values()), handlers)

    def position(self, offset: int) -> int:
        """The position of the instruction at an offset, or whose caches lie there, as a running call's may."""
        return max((place for place, op in enumerate(self.ops) if op.offset <= offset), default=-1)

    def reached(self, starts: Iterable[int], decided: Mapping[int, bool], stops: Callable[[int], bool]) -> set[int]:
        """Positions of the instructions that may run from some positions on.

        Args:
            starts: the positions.
            decided: of jumps that are known to be taken or not, by their positions.
            stops: behind which positions it is not looked.
        """
        found, work = set[int](), [*starts]
        while work:
            place = work.pop()
            if place in found or place >= len(self.ops):
                continue
            found.add(place)
            op = self.ops[place]
            if stops(place):
                continue
            work += [handler for first, last, handler in self.handlers if first <= place < last]
            if op.target is not None and decided.get(place, True):
                work.append(self.at[op.target])
            if op.name not in _LEAVES and not _always_jumps(op) and not decided.get(place, False):
                work.append(place + 1)
        return found

    def conditions(self, call: int, variables: Collection[str]) -> list[Condition]:
        """What decides jumps behind a call, where the function's variables tell it at the time of the call.

        Attributes of variables tell it where no other code runs before, which might set them.

        Args:
            call: the position of the call; of what happens once it is reached again is not asked.
            variables: those that nothing but the function itself changes.
        """
        places = self.behind(call)
        changed = {self.ops[place].value for place in places if self.ops[place].name in ("STORE_FAST", "DELETE_FAST")}
        found = [item for item in map(self._condition, sorted(places)) if item is not None]
        decides = {place for item in found for place in range(item.place - bool(item.compares), item.place + 1)}
        names = {name for item in found for name in item.names[1:]}
        runs = places - decides - {call} - {place for place in places if self._runs_nothing(place, names)}
        late = self.reached(runs, {}, lambda place: place == call)
        return [
            item
            for item in found
            if item.names[0] in variables and item.names[0] not in changed
            if len(item.names) == 1 or item.place not in late
        ]

    def _runs_nothing(self, place: int, names: Collection[str]) -> bool:
        """Whether an instruction runs no code of a user's, but for attributes of these names."""
        op = self.ops[place]
        return op.name.startswith(_RUNS_NOTHING) or (op.name == "LOAD_ATTR" and op.value in names)

    def behind(self, call: int, decided: Mapping[int, bool] | None = None) -> set[int]:
        """Positions of the instructions that may run behind a call, until it is reached again.

        Args:
            call: the position of the call.
            decided: of jumps that are known to be taken or not, by their positions.
        """
        return self.reached([call + 1], decided or {}, lambda place: place == call)

    def _condition(self, place: int) -> Condition | None:
        """What decides the jump at a position, where that is a variable, attributes of it, and a constant."""
        decides = next((how for end, how in _DECIDES.items() if self.ops[place].name.endswith(end)), None)
        if decides is None or not self.ops[place].name.startswith("POP_JUMP"):
            return None
        first, compares = place, None
        if self.ops[first - 1].name == "COMPARE_OP" and self.ops[first - 2].name == "LOAD_CONST":
            how = _COMPARES.get(str(self.ops[first - 1].value).removeprefix("bool(").removesuffix(")"))
            if how is None:
                return None
            first, compares = first - 2, (how, self.ops[first - 2].value)
        names: tuple[str, ...] = ()
        while first > 0 and self.ops[first - 1].name == "LOAD_ATTR":
            first, names = first - 1, (str(self.ops[first - 1].value), *names)
        if first == 0 or self.ops[first - 1].name != "LOAD_FAST":
            return None
        if not self.starts.isdisjoint(range(first, place + 1)):  # it is jumped into: another value is there
            return None
        return Condition(place, (str(self.ops[first - 1].value), *names), compares, decides)


def _simple(item: dis.Instruction) -> Iterator[Op]:
    """An instruction as its oldest form; one for two variables as two."""
    if item.opname in _NOTHING:
        return
    target = item.argval if item.opcode in dis.hasjrel or item.opcode in dis.hasjabs else None
    at: Any = getattr(item, "positions", None)
    begins = None if at is None or at.lineno is None or at.col_offset is None else (at.lineno, at.col_offset)
    parts: list[tuple[str, Any]] = [(item.opname, item.argval)]
    if isinstance(item.argval, tuple) and "_FAST" in item.opname:  # as LOAD_FAST_LOAD_FAST, with two variables
        kinds = [f"{kind}_FAST" for kind in item.opname.split("_") if kind in ("LOAD", "STORE")]
        parts = list(zip(kinds, item.argval, strict=True))
    for name, value in parts:
        if name not in _OTHERS:
            name = next((old for new, old in _NAMES.items() if name.startswith(new)), name)
        if name == "LOAD_ATTR" and "NULL" in item.argrepr:
            name = "LOAD_METHOD"
        if name == "BINARY_OP" and item.argrepr == "[]":
            name = "BINARY_SUBSCR"
        yield Op(name, value, item.offset, target, begins)


def _always_jumps(op: Op) -> bool:
    return op.name.startswith("JUMP_") and "_IF_" not in op.name
