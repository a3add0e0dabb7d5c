"""Which attributes of memopt's objects are written outside of the room whose class declares them.

Types are read off annotations, of parameters, fields and returns, and off calls of classes: an expression whose type
these do not tell is passed over.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.private_torch import tree_of

# Names that say what they hold wherever no type does, as where it is `Any`.
_CALLED = {"session": "Session", "hooks": "Hooks", "sessions": "Sessions"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclasses.dataclass
class _Class:
    """A class: its file, its bases, the names it sets, and the classes of those and of what its functions return."""

    path: Path
    bases: list[str]
    sets: set[str] = dataclasses.field(default_factory=set)
    types: dict[str, str] = dataclasses.field(default_factory=dict)
    returns: dict[str, str] = dataclasses.field(default_factory=dict)


class Written:
    """The classes of some files, and what is written to their objects."""

    def __init__(self, paths: Iterable[Path]) -> None:
        """Read these files; of two classes of one name, both are taken to be meant."""
        self._trees = {path: tree_of(path) for path in paths}
        self._classes: dict[str, list[_Class]] = {}
        self._returns: dict[str, str] = {}
        found: list[tuple[ast.ClassDef, _Class]] = []
        for path, tree in self._trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    known = _Class(path, [name for base in node.bases if (name := _named(base))])
                    self._classes.setdefault(node.name, []).append(known)
                    found.append((node, known))
                elif isinstance(node, Function) and (name := _named(node.returns)):
                    self._returns[node.name] = name
        for _ in range(2):  # what a field is may be told by another class's
            for node, known in found:
                self._read(node, known)

    def found(self) -> Iterator[tuple[Path, int, str, str]]:
        """Each write from another room: the file, the line, what is written, and the class that declares it."""
        for path, tree in self._trees.items():
            for function, owner in _functions(tree):
                types = self._locals(function, owner)
                for node in ast.walk(function):
                    if not (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del)):
                        continue
                    kind = self._type(node.value, types)
                    declared = [each for each in self._lineage(kind) if node.attr in each.sets]
                    if declared and all(each.path.parent != path.parent for each in declared):
                        yield path, node.lineno, ast.unparse(node), str(kind)

    def _read(self, node: ast.ClassDef, known: _Class) -> None:
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                known.sets.add(item.target.id)
                known.types.update({item.target.id: name} if (name := _named(item.annotation)) else {})
            elif isinstance(item, Function):
                types = self._locals(item, node.name)
                if name := _named(item.returns):
                    is_property = any(_named(each) == "property" for each in item.decorator_list)
                    (known.types if is_property else known.returns)[item.name] = name
                for target, value in _assigned(item):
                    if isinstance(target, ast.Attribute) and _named(target.value) == "self":
                        known.sets.add(target.attr)
                        if kind := self._type(value, types):
                            known.types.setdefault(target.attr, kind)

    def _locals(self, function: Function, owner: str | None) -> dict[str, str]:
        """The classes of a function's names."""
        arguments = function.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        types = {item.arg: name for item in every if (name := _named(item.annotation))}
        if owner is not None and every and every[0].arg == "self":
            types["self"] = owner
        for target, value in _assigned(function):
            if isinstance(target, ast.Name) and (kind := self._type(value, types)):
                types.setdefault(target.id, kind)
        return types

    def _type(self, value: ast.expr | None, types: dict[str, str]) -> str | None:
        if isinstance(value, ast.Name):
            known = types.get(value.id)
            return known if known in self._classes else _CALLED.get(value.id.strip("_"))
        if isinstance(value, ast.Attribute):
            every = self._lineage(self._type(value.value, types))
            known = next((each.types[value.attr] for each in every if value.attr in each.types), None)
            return known or _CALLED.get(value.attr.strip("_"))
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            every = self._lineage(self._type(value.func.value, types))
            return next((each.returns[value.func.attr] for each in every if value.func.attr in each.returns), None)
        if isinstance(value, ast.Call):
            name = _named(value.func)
            return name if name in self._classes else self._returns.get(name or "")
        if isinstance(value, ast.IfExp):
            return self._type(value.body, types) or self._type(value.orelse, types)
        return None

    def _lineage(self, name: str | None) -> Iterator[_Class]:
        waiting, seen = [name], set()
        while waiting:
            each = waiting.pop()
            if each in seen or each not in self._classes:
                continue
            seen.add(each)
            for known in self._classes[each]:
                yield known
                waiting += known.bases


def _functions(tree: ast.Module) -> Iterator[tuple[Function, str | None]]:
    """The functions of a file, with the class whose `self` they see."""

    def within(node: ast.AST, owner: str | None) -> Iterator[tuple[Function, str | None]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function):
                yield child, owner
            else:
                yield from within(child, child.name if isinstance(child, ast.ClassDef) else owner)

    return within(tree, None)


@functools.cache
def _assigned(function: Function) -> tuple[tuple[ast.expr, ast.expr | None], ...]:
    """What is assigned to what in a function, tuples apart; an annotation stands for a value that has one."""
    return tuple(pair for node in ast.walk(function) for pair in _pairs(node))


def _pairs(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    if isinstance(node, ast.AnnAssign):
        yield node.target, ast.Call(ast.Name(_named(node.annotation) or ""), [], [])
    elif isinstance(node, ast.AugAssign):
        yield node.target, None
    elif isinstance(node, ast.NamedExpr):
        yield node.target, node.value
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from zip(target.elts, node.value.elts, strict=False)
            elif isinstance(target, ast.Tuple):
                yield from ((each, None) for each in target.elts)
            else:
                yield target, node.value


def _named(annotation: ast.expr | None) -> str | None:
    """The class that an annotation names, one of `C`, `"C"`, `C | None` and `module.C`; None for all else."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return _named(ast.parse(annotation.value, mode="eval").body) if annotation.value.isidentifier() else None
    if isinstance(annotation, ast.Name):
        return annotation.id
    if isinstance(annotation, ast.BinOp):
        left, right = annotation.left, annotation.right
        return _named(left) if isinstance(right, ast.Constant) and right.value is None else None
    return None
