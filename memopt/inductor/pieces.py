"""Backward's generated code in pieces: each gradient is given as soon as the code is through with it.

The function that Inductor writes returns all gradients at its end. Here the same function is a generator, which gives
those of a module's parameters behind the last line that names their memory, by whatever name, or the parameters'.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from memopt.backends.hand_over import Generate
from memopt.graph.targets import gives_views
from memopt.inductor.lines import call_of, made_of
from memopt.memory.hand_over import Due, changed_by_hook
from memopt.torch_compat.operators import OpOverload
from memopt.torch_compat.storages import version_of

GIVE, _VERSION_OF, _CHANGED = "_memopt_give", "_memopt_version_of", "_memopt_changed"
# What makes a tensor of its own, or none at all, whatever it is given.
_APART = ("empty_strided", "extern_kernels.", "get_raw_stream", "assert_", "aten.empty", "torch.empty")
_VIEWS = ("reinterpret_tensor", "alloc_from_pool", "as_strided")


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Code whose `call` is a generator.

    Attributes:
        source: of the module: `call` takes a list of arguments and what takes the gradients of a hand-over.
        outputs: by hand-over, in order, which of the results it gives; these are None where it returns.
    """

    source: str
    outputs: tuple[tuple[int, ...], ...]


def in_pieces(source: str, due: Sequence[Due], shown: Mapping[str, str]) -> Pieces | None:
    """The code of a module that gives what is due as it goes; None where it is of another form, or nothing is due.

    Args:
        source: that Inductor has written.
        due: gradients that are to be given together, by their number among the results.
        shown: by name, arguments that show a parameter's or a buffer's memory, and its name: hooks may write there.
    """
    tree = ast.parse(source)
    call = call_of(tree)
    last = call.body[-1] if call is not None else None
    if call is None or not isinstance(last, ast.Return) or not isinstance(last.value, (ast.Tuple, ast.List)):
        return None
    lines = [line for line in _lines(call.body) if line.statement is not last]
    memory = _Memory(line.statement for line in lines)
    results = last.value.elts
    showing = [memory.of_all(_names(result)) for result in results]
    found: dict[int, list[tuple[int, ...]]] = {}
    for item in due:
        outputs = [number for number in item.outputs if _is_apart(number, showing, memory.given)]
        if not outputs:
            continue
        memories = set[str]().union(*(showing[number] for number in outputs))
        watched = memories | memory.holding(memories) | set(item.shown)
        at = max((index for index, line in enumerate(lines) if line.names & watched), default=-1)
        while 0 <= at < len(lines) - 1 and isinstance(lines[at + 1].statement, ast.Delete):
            at += 1  # what the code drops there is not to stay while hooks run
        if at >= 0:
            found.setdefault(at, []).append(tuple(outputs))
    if not found:
        return None
    order = [(at, outputs) for at in sorted(found) for outputs in found[at]]
    for at, line in enumerate(lines):
        line.before = _checks(line, shown, memory.given) if at > min(found) else []
    bound = _bound(line.statement for line in lines)
    for number, (at, given) in enumerate(order):
        names = set[str]().union(*(showing[output] for output in given))
        names |= memory.holding(names)
        lines[at].after += _given(number, [results[output] for output in given], sorted(names & bound[at]))
        for output in given:
            results[output] = ast.Constant(None)
    _put(call.body, {id(line.statement): line for line in lines})
    read = {name for line in lines if line.before for name in line.names if name in shown}
    start = next((index + 1 for index, item in enumerate(call.body) if "args.clear" in ast.unparse(item)), None)
    if start is None:
        return None
    call.body[start:start] = [_parsed(f"{name}_version = {_VERSION_OF}({name})") for name in sorted(read)]
    call.args.args.append(ast.arg(GIVE))
    return Pieces(ast.unparse(ast.fix_missing_locations(tree)), tuple(outputs for _, outputs in order))


# What the code asks for beside what Inductor's does.
NAMES: Mapping[str, Any] = {_VERSION_OF: version_of, _CHANGED: changed_by_hook}


def generator_of(pieces: Pieces, module: types.ModuleType) -> Generate:
    """The code of a loaded module in pieces."""
    function = call_of(ast.parse(pieces.source))
    assert function is not None
    made: Generate = made_of(function, module, NAMES)
    return made


@dataclasses.dataclass
class _Line:
    """A statement of the function, and what is put around it."""

    statement: ast.stmt
    names: frozenset[str]
    before: list[ast.stmt] = dataclasses.field(default_factory=list)
    after: list[ast.stmt] = dataclasses.field(default_factory=list)


def _lines(body: Sequence[ast.stmt]) -> Iterator[_Line]:
    for statement in body:
        if isinstance(statement, ast.With):
            yield from _lines(statement.body)
        else:
            yield _Line(statement, frozenset(_names(statement)))


def _put(body: list[ast.stmt], known: Mapping[int, _Line]) -> None:
    for statement in list(body):
        if isinstance(statement, ast.With):
            _put(statement.body, known)
        elif (line := known.get(id(statement))) is not None:
            index = next(place for place, item in enumerate(body) if item is statement)
            body[index : index + 1] = [*line.before, statement, *line.after]


def _names(node: ast.AST) -> set[str]:
    """The names of variables in it, of functions that it calls left out."""
    called = {id(item.func) for item in ast.walk(node) if isinstance(item, ast.Call)}
    return {item.id for item in ast.walk(node) if isinstance(item, ast.Name) and id(item) not in called}


class _Memory:
    """Which names of a function may show the same memory.

    Attributes:
        given: the names of the function's arguments.
    """

    def __init__(self, statements: Iterable[ast.stmt]) -> None:
        self._above: dict[str, str] = {}
        self._members: dict[str, set[str]] = {}
        self._held: dict[str, str] = {}  # by name of a result among several, the name of all of them
        self._several: set[str] = set()
        self.given: set[str] = set()
        for statement in statements:
            if not isinstance(statement, ast.Assign):
                continue
            targets = set[str]().union(*map(_names, statement.targets))
            if isinstance(statement.value, ast.Name) and statement.value.id == "args":
                self.given |= targets
                continue
            shown = _shown_by(statement.value)
            if not shown:
                self._several |= targets
            for target in targets:
                for name in shown:
                    if isinstance(statement.value, ast.Subscript) and name in self._several:
                        self._held[target] = name
                    else:
                        self._join(target, name)

    def of_all(self, names: Iterable[str]) -> set[str]:
        """All names of the memory that these show."""
        return set[str]().union(*(self._members.get(self._root(name), {name}) for name in names))

    def holding(self, names: Iterable[str]) -> set[str]:
        """The names of several results of one operator, which these are among: each has memory of its own."""
        return {self._held[name] for name in names if name in self._held}

    def _root(self, name: str) -> str:
        while name in self._above:
            name = self._above[name]
        return name

    def _join(self, one: str, other: str) -> None:
        one, other = self._root(one), self._root(other)
        if one != other:
            self._above[other] = one
            self._members[one] = self._members.get(one, {one}) | self._members.pop(other, {other})


def _shown_by(value: ast.expr) -> set[str]:
    """The names whose memory an expression may show."""
    if not isinstance(value, ast.Call):
        return _names(value)
    called = ast.unparse(value.func)
    if called.startswith(_VIEWS):
        return _names(value.args[0])
    if called.startswith(_APART) or _makes_its_own(called):
        return set()
    return _names(value) - _names(value.func)


def _makes_its_own(called: str) -> bool:
    """Whether an operator by this name returns nothing that shows what it was given."""
    target: Any = torch
    if not called.startswith("torch.ops."):
        return False
    for part in called.split(".")[1:]:
        target = getattr(target, part, None)
    return isinstance(target, OpOverload) and not gives_views(target)


def _is_apart(number: int, showing: Sequence[set[str]], given: set[str]) -> bool:
    """Whether a result shows memory that the code has made, and that no other result shows."""
    return (
        bool(showing[number])
        and not showing[number] & given
        and all(other == number or not names & showing[number] for other, names in enumerate(showing))
    )


def _bound(statements: Iterable[ast.stmt]) -> list[set[str]]:
    """By statement, the names that there are behind it."""
    found: list[set[str]] = []
    names: set[str] = set()
    for statement in statements:
        if isinstance(statement, ast.Assign):
            names = names | set[str]().union(*map(_names, statement.targets))
        elif isinstance(statement, ast.Delete):
            names = names - set[str]().union(*map(_names, statement.targets))
        found.append(names)
    return found


def _given(number: int, values: Sequence[ast.expr], names: Sequence[str]) -> list[ast.stmt]:
    items = ast.Tuple([copy.deepcopy(value) for value in values], ast.Load())
    give = ast.Expr(ast.Call(ast.Name(GIVE, ast.Load()), [ast.Constant(number), items], []))
    dropped = [_parsed(f"del {', '.join(names)}")] if names else []
    return [give, *dropped, ast.Expr(ast.Yield(None))]


def _checks(line: _Line, shown: Mapping[str, str], given: set[str]) -> list[ast.stmt]:
    if isinstance(line.statement, ast.Delete):
        return []
    read = sorted(name for name in line.names & given if name in shown)
    return [_parsed(f"{_VERSION_OF}({name}) == {name}_version or {_CHANGED}({shown[name]!r})") for name in read]


def _parsed(line: str) -> ast.stmt:
    return ast.parse(line).body[0]
