"""Which versions of torch memopt was tried on."""

import re
from pathlib import Path

import pytest
import torch

from memopt.torch_compat.versions import TRIED, untried


def test_they_are_those_of_which_the_table_says_what_was_tried():
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| (2\.\d+) \| (?!nothing)", text, re.MULTILINE)
    assert set(rows) == set(TRIED)


@pytest.mark.parametrize(
    ("version", "found"),
    [("2.11.0+cu130", ""), ("2.14.1", ""), ("2.1.2", "2.1.2"), ("2.110.0", "2.110.0"), ("3.0.0a0", "3.0.0a0")],
)
def test_one_of_another_minor_version_is_none_of_them(version, found, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    assert untried() == found
