"""Run the command line in this process, with stdout and stderr apart, in an empty folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from memopt.cli import main

FACTORIES = """
import torch

class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).relu().sum()

class Sized(Tiny):
    def example_inputs(self, batch, labels=False):
        return {"x": torch.ones(batch, 4)}

def pair():
    return Tiny(), (torch.ones(3, 4),)

def one_tensor():
    return Tiny(), torch.ones(3, 4)

def number():
    return 7

def broken():
    raise RuntimeError("no disk")

value = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder that holds the module `factories`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "factories", raising=False)
    (tmp_path / "factories.py").write_text(FACTORIES)
    return tmp_path


@pytest.fixture
def run(folder: Path) -> Callable[..., Result]:
    """Call `memopt` with the given words."""

    def call(*words: object) -> Result:
        return CliRunner().invoke(main, [str(word) for word in words])

    return call


def assert_one_line(result: Result, code: int, *expected: str) -> None:
    """Nothing on stdout, one line on stderr that holds what is expected, and the exit code."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for part in expected:
        assert part in result.stderr


def left_in(folder: str | os.PathLike[str]) -> list[str]:
    """Names of what is in a folder, without what Python keeps of modules that are loaded from there."""
    return sorted(name for name in os.listdir(folder) if name != "__pycache__")
