"""The versions of torch that memopt was tried on: CONTRIBUTING.md says what was tried on each."""

from __future__ import annotations

import torch

TRIED = ("2.11", "2.13", "2.14")


def untried() -> str:
    """The version of torch that runs, where memopt was not tried on it; else empty."""
    version = str(torch.__version__)
    return "" if version.startswith(tuple(f"{each}." for each in TRIED)) else version
