"""Which modules have a test of their own: a file that is called after them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path


def untested(modules: Iterable[Path], tests: Path) -> Iterator[Path]:
    """The modules that no test file is called after: `test_NAME.py`, with words before or behind the name.

    Args:
        modules: their files.
        tests: the folder of the tests, which are searched at any depth.
    """
    files = {path.stem for path in tests.rglob("test_*.py")}
    for path in modules:
        called = re.compile(rf"test_(\w+_)?{path.stem}(_\w+)?")
        if not any(map(called.fullmatch, files)):
            yield path
