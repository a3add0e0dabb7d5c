"""Solvers are plain numbers: their modules import the standard library, numpy and one another, nothing else."""

import ast
import sys
from pathlib import Path

import memopt

_SOLVE = Path(memopt.__file__).parent / "solve"


def _imported(source: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level
            names.add(node.module)
    return names


def test_no_solver_imports_torch_or_a_package_that_could():
    modules = sorted(_SOLVE.rglob("*.py"))
    assert {"problem.py", "recompute.py", "search.py"} <= {path.name for path in modules}
    for path in modules:
        for name in _imported(path.read_text()):
            package = name.split(".")[0]
            inside = name.startswith("memopt.solve.")
            assert inside or package == "numpy" or package in sys.stdlib_module_names, f"{path.name} imports {name}"


def test_imports_are_found_wherever_they_stand():
    source = "import torch.fx\ndef f():\n    from torch import nn\n    import numpy as np, os\n"
    assert _imported(source) == {"torch.fx", "torch", "numpy", "os"}
