"""Random modules and the loops that use them, through `memopt.compile`: everything that a user can see is eager's.

benchmarks/random_modules.py runs more of them, in many processes.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.modules.judging import FAILURES, judge
from tests.modules.programs import program
from tests.modules.settings import settings

# Engine, kind of loops, the first seed, chunks, and programs in each: with `USERS` and `MENDED` some ninety.
REGULAR = (
    ("aten", "training", 10_000_000, 2, 25),
    ("aten", "inference", 11_000_000, 1, 25),
    ("inductor", "training", 12_000_000, 1, 5),
)
# Of the users' loops those that take a second or two: with a budget and without, refused, checked in full.
USERS = (13_000_000, 13_000_004, 13_000_006, 13_000_009, 13_000_010, 13_000_011)
# Seeds that were wrong once, among twenty thousand others.
MENDED = (60_001_153, 60_001_482, 60_003_270, 60_005_008, 60_000_177, 61_000_160)
# Behind `long`: with those above a thousand.
LONG = (
    ("aten", "training", 10_000_050, 32, 25),
    ("aten", "inference", 11_000_025, 2, 25),
    ("aten", "users", 13_000_000, 2, 4),
    ("aten", "users", 13_000_008, 6, 6),
    ("inductor", "training", 12_000_005, 3, 5),
    ("inductor", "users", 14_000_000, 1, 3),
)
# Behind `slow`: 21,000 in all.
SLOW = (
    ("aten", "training", 20_000_000, 60, 250),
    ("aten", "inference", 21_000_000, 4, 250),
    ("aten", "users", 24_000_000, 16, 50),
    ("inductor", "training", 22_000_000, 76, 50),
    ("inductor", "users", 25_000_000, 8, 25),
    ("static", "inference", 23_000_000, 4, 50),
)


def chunks() -> list[Any]:
    """One parameter a chunk, so that workers can share them."""
    rows = [
        pytest.param("aten", "training", MENDED, id="aten-mended"),
        pytest.param("aten", "users", USERS, id="aten-users"),
    ]
    for table, marks in ((REGULAR, ()), (LONG, (pytest.mark.long,)), (SLOW, (pytest.mark.slow,))):
        for engine, loops, start, count, programs in table:
            for first in range(start, start + count * programs, programs):
                name = "-".join([engine, *([loops] if loops != "training" else []), str(first)])
                rows.append(pytest.param(engine, loops, range(first, first + programs), marks=marks, id=name))
    return rows


@pytest.mark.parametrize(("engine", "loops", "seeds"), chunks())
def test_random_modules_do_what_eager_does(engine: str, loops: str, seeds: Sequence[int]) -> None:
    """Each differs from eager in nothing, or is refused in one line."""
    wrong = []
    for seed in seeds:
        torch._dynamo.reset()
        gc.collect()
        gc.freeze()  # each plan collects garbage, several times: all that earlier programs keep would be looked at
        made = program(seed, loops)
        budget, verify = settings(seed, loops)
        verdict = judge(made, engine, budget, verify)
        if verdict.kind in FAILURES:
            wrong.append(f"seed {seed}, {engine}, budget={budget}, verify={verify!r}: {verdict.kind}: {verdict.detail}")
            wrong.append(made.source)
    torch._dynamo.reset()
    assert not wrong, "\n".join(wrong)
