"""Which modules have a test of their own: a file of their name, or tests that import them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path


def untested(modules: Iterable[Path], package: Path, name: str, tests: Path) -> Iterator[str]:
    """The modules that no test file is called after, and that none imports.

    Args:
        modules: their files.
        package: the folder that they lie in.
        name: as which that is imported.
        tests: the folder of the tests, which are searched at any depth.
    """
    files = {path: path.read_text() for path in tests.rglob("test_*.py")}
    for path in modules:
        called = re.compile(rf"test_(\w+_)?{path.stem}(_\w+)?")
        dotted = ".".join((name, *path.relative_to(package).with_suffix("").parts))
        parent, _, leaf = dotted.rpartition(".")
        imports = re.compile(rf"(from|import) {re.escape(dotted)}\b|from {re.escape(parent)} import [^\n]*\b{leaf}\b")
        if not any(called.fullmatch(file.stem) or imports.search(text) for file, text in files.items()):
            yield dotted
