"""The README's figures are those of the committed results."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_readme_agrees_with_the_results():
    check = [sys.executable, str(ROOT / "benchmarks" / "render.py"), "--check"]
    found = subprocess.run(check, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


def test_every_result_is_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        page = path.with_suffix(".md")  # a table too long for the README has a page of its own
        named = f"(benchmarks/results/{page.name})" if page.exists() else f"<!-- results: {path.name} -->"
        assert named in readme
