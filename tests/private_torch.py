"""What a file names of torch that is private, by the rule in CONTRIBUTING.md."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import fx, nn

# Of torch's documentation, in spite of the underscore: a check of sizes while they are traced, and one launch for many.
DOCUMENTED = {"torch._check", "torch._foreach_copy_"}
# Documented by others than torch: Python, a class of onnx's to be overridden, transformers, TensorFlow.
OTHERS = {"_asdict", "_exit", "_fields", "_getframe", "_replace", "_run", "_model_mapping", "_handle_data"}
# What objects of torch's have, by a name that memopt may have for something of its own as well.
TORCHS = {"_boxed_call", "_post_accumulate_grad_hooks", "_in_backward_optimizers"}
for _value in (torch.empty(0), torch.empty(0).untyped_storage(), nn.Module(), torch.ops.aten.add.Tensor):
    TORCHS |= {name for name in dir(_value) if name.startswith("_") and not name.startswith("__")}
TORCHS |= {name for name in (*dir(fx.Node), *dir(fx.Graph), *dir(fx.GraphModule)) if name.startswith("_")}

_ASK = {"getattr", "hasattr", "setattr", "delattr"}
_NAMED = re.compile(r"\btorch(?:\.\w+)*\.(?:_[A-Za-z]|fx\.experimental)")


def own_names(paths: Iterable[Path]) -> set[str]:
    """Names with an underscore that these files give to something of their own: functions, classes, attributes."""
    found = set()
    for path in paths:
        for node in nodes_of(path):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _root(node) in ("self", "cls"):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("_memopt"):
                found.add(node.value)
    return {name for name in found if _is_private(name)}


def private_uses(path: Path, own: set[str]) -> Iterator[str]:
    """Each private name of torch's that a file imports, reads or asks for by a string; and `unittest`.

    Args:
        path: a file of Python.
        own: `own_names` of all files.
    """
    nodes = nodes_of(path)
    here = own_names([path])
    names = dict(_imported(nodes))
    for name, value in _assigned(nodes):
        if _dotted(value, names).startswith("torch.ops"):
            names[name] = _dotted(value, names)
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            of = "" if isinstance(node, ast.Import) else f"{node.module}."
            for name in (of + item.name for item in node.names):
                if _is_torchs(name) or name.split(".")[0] == "unittest":
                    yield name
        elif isinstance(node, ast.Attribute):
            dotted = _dotted(node, names)
            if dotted:
                if id(node) not in inner and _is_torchs(dotted):
                    yield dotted
            elif _is_private(node.attr) and not _is_own(node.attr, _root(node) == "self", own, here):
                yield ast.unparse(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _ASK:
            asked = node.args[1]
            if isinstance(asked, ast.Constant) and _is_private(str(asked.value)):
                ops = _dotted(node.args[0], names).startswith("torch.ops")
                if not ops and not _is_own(str(asked.value), ast.unparse(node.args[0]) == "self", own, here):
                    yield ast.unparse(node)
    for text in _strings(nodes):
        if _NAMED.search(text):
            yield repr(text)


@functools.lru_cache(maxsize=1)
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file of Python, of which the last one asked for is remembered."""
    return tuple(ast.walk(tree_of(path)))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """A file of Python, parsed once: several rules go through all files."""
    return ast.parse(path.read_text())


def _imported(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    for node in nodes:
        if isinstance(node, ast.Import):
            for item in node.names:
                if item.name.split(".")[0] == "torch":
                    yield (item.asname, item.name) if item.asname else ("torch", "torch")
        elif isinstance(node, ast.ImportFrom) and node.module:
            for item in node.names:
                if node.module.split(".")[0] == "torch":
                    yield item.asname or item.name, f"{node.module}.{item.name}"
                elif item.name in ("aten", "prims"):  # as another file has named them
                    yield item.name, f"torch.ops.{item.name}"


def _assigned(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    """Names, each with what it is set to."""
    for node in nodes:
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = zip(target.elts, value.elts, strict=False)
            else:
                pairs = zip([target], [value], strict=True)
            yield from ((item.id, of) for item, of in pairs if isinstance(item, ast.Name))
        elif isinstance(node, ast.AnnAssign) and node.value is not None and isinstance(node.target, ast.Name):
            yield node.target.id, node.value


def _strings(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Strings that are no docstrings."""
    words = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in words:
            yield node.value


def _dotted(node: ast.AST, names: dict[str, str]) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    known = isinstance(node, ast.Name) and node.id in names
    return ".".join([names[node.id], *reversed(parts)]) if known else ""  # type: ignore[attr-defined]


def _root(node: ast.Attribute) -> str:
    """Of which name it is an attribute; empty for one of an attribute."""
    return node.value.id if isinstance(node.value, ast.Name) else ""


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def _is_torchs(dotted: str) -> bool:
    first, *parts = dotted.split(".")
    if first != "torch" or parts[:1] == ["ops"] or dotted in DOCUMENTED:  # operators go by their names in graphs
        return False
    return any(map(_is_private, parts)) or parts[:2] == ["fx", "experimental"]


def _is_own(name: str, of_self: bool, own: set[str], here: set[str]) -> bool:
    if name in TORCHS:
        return of_self and name in here
    return name in own or name in OTHERS
