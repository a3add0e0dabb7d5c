"""Generated code that says which line comes next: before whatever may take memory."""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Mapping
from typing import Any

from memopt.cuda_graphs.step import Call

# How the code calls what it is told.
_BEFORE = "_memopt_before"
# Names by which it calls what takes no memory of the device.
_HARMLESS = {
    "assert_alignment",
    "assert_size_stride",
    "get_raw_stream",
    "reinterpret_tensor",
    "run_intermediate_hooks",
}


def with_lines(
    source: str, module: types.ModuleType, before: Callable[[int], None], first: int = 0
) -> tuple[Call, int] | None:
    """The function `call` of a generated module, which tells the number of each line that may take memory beforehand.

    Args:
        source: the module's source.
        module: the same, loaded: what it has loaded is used.
        before: told the number of a line before it runs.
        first: the number of the first line.

    Returns:
        The function, and the number after the last; None where the module has no such function.
    """
    found = call_of(ast.parse(source))
    if found is None:
        return None
    counter = _Counter(first)
    found.body = counter.instrumented(found.body)
    return made_of(found, module, {_BEFORE: before}), counter.next


def call_of(tree: ast.AST) -> ast.FunctionDef | None:
    """The function that runs a generated module, in its source."""
    return next((node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "call"), None)


def made_of(function: ast.FunctionDef, module: types.ModuleType, names: Mapping[str, Any]) -> Any:
    """An edited `call` of a generated module, which uses what the module has loaded.

    Args:
        function: the edited function.
        module: the generated module, loaded.
        names: what the function calls beside what the module has.
    """
    function.name, function.decorator_list = "_memopt_call", []
    made: dict[str, Any] = {}
    module.__dict__.update(names)
    code = ast.fix_missing_locations(ast.Module(body=[function], type_ignores=[]))
    exec(compile(code, module.__file__ or "<inductor wrapper>", "exec"), module.__dict__, made)
    own = getattr(module, "runner", None)
    return types.MethodType(made["_memopt_call"], own) if function.args.args[0].arg == "self" else made["_memopt_call"]


class _Counter:
    """Numbers the lines of a body."""

    def __init__(self, first: int) -> None:
        self.next = first

    def instrumented(self, body: list[ast.stmt]) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for statement in body:
            if isinstance(statement, (ast.With, ast.If, ast.For)):
                statement.body = self.instrumented(statement.body)
            elif _takes_memory(statement):
                call = ast.Call(ast.Name(_BEFORE, ast.Load()), [ast.Constant(self.next)], [])
                found.append(ast.Expr(call))
                self.next += 1
            found.append(statement)
        return found


def _takes_memory(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, (ast.Assign, ast.Expr)) else None
    if not isinstance(value, ast.Call):
        return False
    if isinstance(statement, ast.Assign):
        return not (isinstance(value.func, ast.Name) and value.func.id in _HARMLESS)
    # A kernel of the module's own writes where it is told; a library call may take room for itself.
    root = value.func
    while isinstance(root, ast.Attribute):
        root = root.value
    return isinstance(root, ast.Name) and root.id in ("extern_kernels", "torch", "aten")
