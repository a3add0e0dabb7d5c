"""The site of the docs builds without a warning, from the pages of the repository."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import memopt

ROOT = Path(__file__).resolve().parent.parent
SITE = runpy.run_path(str(ROOT / "docs" / "site.py"))


def test_every_link_of_a_page_leads_to_a_file_that_is_laid_with_it(tmp_path):
    SITE["lay"](tmp_path)
    pages = sorted(tmp_path.rglob("*.md"))
    assert len(pages) > 12
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), (page.name, target)
    nav = re.findall(r"^  - \w+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert len(nav) > 6 and all((tmp_path / name).exists() for name in nav)


def test_the_reference_names_all_that_is_public():
    text = (ROOT / "docs" / "api.md").read_text()
    named = {line.rpartition(".")[2] for line in text.splitlines() if line.startswith("::: ")}
    assert set(memopt.__all__) - named == {"INFERENCE", "TRAINING", "Comparison", "models"}


def test_it_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="make docs installs it")
    SITE["lay"]()
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    settings = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=settings)
    assert (found.returncode, found.stderr) == (0, "")
    page = (tmp_path / "docs" / "api" / "index.html").read_text()
    assert "BudgetError" in page and "Raises" in page
