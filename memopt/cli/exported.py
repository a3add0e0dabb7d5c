"""Reading a `.pt2` of torch.export, after making sure that no code in it runs when it is read."""

from __future__ import annotations

import ast
import io
import json
import re
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.export import ExportedProgram

from memopt.cli.checkpoint import refuse_compressed
from memopt.cli.group import USAGE, CommandError
from memopt.errors import first_line
from memopt.torch_compat.exporting import load_program
from memopt.torch_compat.symbols import function_of_symbols

_OPERATIONS = (ast.Expression, ast.Call, ast.Name, ast.Load, ast.Constant, ast.keyword, ast.BinOp, ast.UnaryOp,
               ast.Compare, ast.operator, ast.unaryop, ast.cmpop, ast.BoolOp, ast.boolop)  # fmt: skip
_PLAIN_NAMES = {"oo", "int_oo", "True", "False", "true", "false"}


def load_exported(path: Path, *, trust_pickle: bool = False) -> ExportedProgram:
    """Read an exported program.

    torch.export.load unpickles whatever the archive asks it to, loads compiled libraries, and evaluates the text of
    symbolic sizes; without `trust_pickle` an archive with any such thing in it is refused.

    Raises:
        CommandError: the file is broken, or reading it could run code.
    """
    refuse_compressed(path)
    if not trust_pickle:
        reason = _code(path)
        if reason:
            raise CommandError(f"reading {path} may run code ({reason}); if you trust it, add --trust-pickle", USAGE)
    try:
        with warnings.catch_warnings():
            # Torch 2.11 views the archive's bytes, and never writes to them.
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
            return load_program(path)
    except Exception as error:
        raise CommandError(f"{path} is no program of torch.export: {first_line(error)}") from error


def _code(path: Path) -> str | None:
    """What in the archive could run code, or None."""
    try:
        with zipfile.ZipFile(path) as archive:
            return next(_suspects(archive), None)
    except (zipfile.BadZipFile, OSError, ValueError, KeyError, RecursionError) as error:
        raise CommandError(f"{path} is no program of torch.export: {error}") from error


def _suspects(archive: zipfile.ZipFile) -> Iterator[str]:
    pickled = {name for name in archive.namelist() if name.endswith(".pt")}
    for name in archive.namelist():
        if "/aotinductor/" in name or name.endswith((".so", ".dll")):
            yield f"{name} is a compiled library"
        if not name.endswith(".json"):
            continue
        content = json.loads(archive.read(name))
        for entry in _dictionaries(content):
            if entry.get("use_pickle"):
                pickled |= {other for other in archive.namelist() if other.endswith(f"/{entry.get('path_name')}")}
            if str(entry.get("path_name", "")).startswith(("custom_obj", "opaque_obj")):
                yield f"{name} asks for a pickled object"
            if "expr_str" in entry and not _is_size(str(entry["expr_str"])):
                yield f"{name} holds a size that is no plain formula"
    for name in sorted(pickled):
        data = archive.read(name)
        try:
            if data:
                torch.load(io.BytesIO(data), weights_only=True)
        except Exception:
            yield f"{name} holds more than tensors"


def _dictionaries(value: Any) -> Iterator[dict[str, Any]]:
    work = [value]
    while work:
        item = work.pop()
        if isinstance(item, dict):
            yield item
            work.extend(item.values())
        elif isinstance(item, list):
            work.extend(item)


def _is_size(text: str) -> bool:
    """Whether a symbolic size is built of sympy's own arithmetic and of symbols alone."""
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError):
        return False
    named = {
        id(node.args[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Symbol" and node.args
    }
    for node in ast.walk(tree):
        if not isinstance(node, _OPERATIONS):
            return False
        if isinstance(node, ast.Call) and not isinstance(node.func, ast.Name):
            return False
        if isinstance(node, ast.Name) and not _is_arithmetic(node.id):
            return False
        # Sympy evaluates the texts that it finds elsewhere than in a symbol's name.
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, str | bytes) and not (id(node) in named and re.fullmatch(r"\w+", str(value))):
            return False
    return True


def _is_arithmetic(name: str) -> bool:
    if name in _PLAIN_NAMES or re.fullmatch(r"[a-z]\w*\d+", name):
        return True
    found = function_of_symbols(name) or getattr(sympy, name, None)
    return isinstance(found, type) and issubclass(found, sympy.Basic)
