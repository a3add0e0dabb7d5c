"""Which modules have a test of their own: a file of their name, or tests that import them."""

from __future__ import annotations

import functools
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
    files = _files(tests)
    for path in modules:
        called = re.compile(rf"test_(\w+_)?{path.stem}(_\w+)?")
        dotted = ".".join((name, *path.relative_to(package).with_suffix("").parts))
        parent, _, leaf = dotted.rpartition(".")
        imports = re.compile(rf"(from|import) {re.escape(dotted)}\b|from {re.escape(parent)} import [^\n]*\b{leaf}\b")
        if any(map(called.fullmatch, files)):
            continue
        if not any(leaf in text and imports.search(text) for text in files.values()):
            yield dotted


@functools.cache
def _files(tests: Path) -> dict[str, str]:
    """What the tests' files say of imports, by name; of several of one name what all of them say."""
    files: dict[str, str] = {}
    for path in tests.rglob("test_*.py"):
        lines = [line for line in path.read_text().splitlines() if "import" in line]
        files[path.stem] = "\n".join((files.get(path.stem, ""), *lines))
    return files
