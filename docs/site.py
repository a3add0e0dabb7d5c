"""Build the site of these pages: `make docs`, or `python docs/site.py`; it lies in build/site.

The pages are those of the repository, in the same folders, so that their links hold: the README is the first.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "build" / "site-source"
# What pages link to.
FILES = (
    "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "CITATION.cff", "docs/*.md", "docs/*.css", "docs/examples/*.html",
    "examples/*.py", "benchmarks/results/*.md",
)  # fmt: skip
EXAMPLES = "# Examples\n\nReports as they come out.\n\n"


def lay(folder: Path = SOURCE) -> None:
    """Lay the pages where mkdocs takes them from; what was there goes."""
    shutil.rmtree(folder, ignore_errors=True)
    for pattern in FILES:
        for path in sorted(ROOT.glob(pattern)):
            put(folder / path.relative_to(ROOT), path)
    put(folder / "index.md", ROOT / "README.md")
    reports = sorted((ROOT / "docs" / "examples").glob("*.html"))
    lines = [f"- [{path.stem.replace('_', ' ')}]({path.name})" for path in reports]
    (folder / "docs" / "examples" / "index.md").write_text(EXAMPLES + "\n".join(lines) + "\n")


def put(target: Path, path: Path) -> None:
    """One file; in a page, the README is the first page, and the folder of examples is theirs."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix != ".md":
        shutil.copyfile(path, target)
        return
    text = re.sub(r"\]\(((?:\.\./)?)README\.md", r"](\1index.md", path.read_text())
    text = text.replace("](docs/examples)", "](docs/examples/index.md)")
    # A list must stand apart from the line before it.
    target.write_text(re.sub(r"(?m)^((?!- |\d+\. |\s|\||#).+)\n(- |1\. )", r"\1\n\n\2", text))


def main() -> int:
    """Lay the pages, and build the site; a warning is an error."""
    lay()
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}).returncode


if __name__ == "__main__":
    sys.exit(main())
