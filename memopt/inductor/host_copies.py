"""How Inductor runs copies to the host and back: in the graph's order, on the very memory that the graph names."""

from __future__ import annotations

import functools
from typing import Any

from memopt.host.operators import ARRIVED, ARRIVED_INTO, FETCH, LANDED, LANDED_INTO, TO_HOST
from memopt.torch_compat.inductor_lowering import call, call_for, lower_as_call, lower_by


@functools.cache
def register_host_copies() -> None:
    """Tell Inductor, once in a process, of the operators.

    What waits for a copy is told to Inductor as a write to what was copied: so nothing reads that before.
    """
    lower_as_call(TO_HOST)
    lower_by(FETCH, _fetch)
    lower_by(LANDED, _landed)
    lower_by(ARRIVED, _arrived)


def _fetch(held: Any, place: Any) -> Any:
    return call_for(FETCH, held, place)


def _landed(value: Any, held: Any) -> Any:
    call(LANDED_INTO, value, held)
    return held


def _arrived(value: Any, held: Any) -> Any:
    call(ARRIVED_INTO, value, held)
    return value
