"""Retry of a trial step that ran out of memory which other processes held for a moment."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

from memopt.step.trial_step import Short, is_short

_T = TypeVar("_T")

# Seconds for which memory that other processes hold is waited for, and between two looks.
_WAIT, _LOOK = 20.0, 0.5
# How often a step is taken that others left too little memory.
_TRIES = 3


def patiently(step: Callable[[], _T | Short], device: torch.device, allowed: int) -> _T | Short:
    """Take a step, and again where other processes held what it lacked and give it back in time."""
    for _ in range(_TRIES):
        taken = step()
        if not isinstance(taken, Short) or not (_given_back(device, allowed) or taken.others):
            break
    return taken


def _given_back(device: torch.device, allowed: int) -> bool:
    """Whether the device was short of what may be held here because of other processes, and now is not.

    Several processes that compile side by side take their steps one after the other: what one of them holds for a
    moment says nothing of another one's plan.
    """
    until = time.monotonic() + _WAIT
    short = False
    while is_short(device, allowed):
        if time.monotonic() > until:
            return False
        short = True
        time.sleep(_LOOK)
    return short
