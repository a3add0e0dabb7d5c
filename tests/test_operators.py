"""The committed table of operator samples agrees with reality: an entry newly equal or newly not is a failure."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from memopt.pass_manager import PassManager
from memopt.program import Program
from tests.operators import (
    CHUNKS,
    FULL,
    QUICK,
    TABLE,
    TOGETHER,
    Entry,
    database,
    examine,
    expected_equal,
    read_table,
    restricted,
    unequal,
)

pytestmark = [
    # PyTorch's own samples and test helpers warn, by version, of what they exercise.
    pytest.mark.filterwarnings("ignore"),
]


@cache
def operators() -> dict[str, Any]:
    return database()


def disagreements(names: list[str], limit: int) -> dict[str, tuple[Entry, Entry]]:
    """Entries whose outcome is not the table's, as (table, reality). Internal errors are raised as they come."""
    table = read_table()
    listed = {name: restricted(table["entries"].get(name, "equal"), limit) for name in names}
    # Nearly all of an export's time is for each export, whatever its length: several operators share one.
    pairs = [pair for name in names for pair in expected_equal(operators()[name], limit, listed[name])]
    doubtful = unequal(pairs) if len(names) > 1 else [operators()[name] for name in names]
    found = {}
    for name in names:
        op = operators()[name]
        entry = examine(op, limit, listed[name], known=all(op is not other for other in doubtful))
        if entry != listed[name]:
            found[name] = (listed[name], entry)
    return found


def same_version() -> bool:
    return torch.__version__.split("+")[0] == read_table()["torch"].split("+")[0]


def test_table_lists_every_operator_of_its_version() -> None:
    if not same_version():
        pytest.skip(f"the table was made with torch {read_table()['torch']}")
    assert set(read_table()["entries"]) == set(operators())


def test_every_listed_sample_has_a_reason_that_is_no_error() -> None:
    for name, entry in read_table()["entries"].items():
        reasons = [reason for outcomes in ({} if entry == "equal" else entry).values() for reason in outcomes]
        for reason in reasons:
            assert reason.split(":")[0] in ("refused", "not on CPU", "uninitialised memory", "differs"), (name, reason)


def test_of_operators_that_are_captured_together_those_that_differ_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("max.reduction_with_dim", "sin", "cos", "aminmax", "exp")  # two of them return two results
    pairs = [pair for name in names for pair in expected_equal(operators()[name], 1, "equal")]
    assert unequal(pairs) == []
    real = PassManager.run

    def planted(self: PassManager, program: Program) -> Any:
        rewritten, records = real(self, program)
        for node in rewritten.graph.nodes:
            if node.target is torch.ops.aten.cos.default:
                node.target = torch.ops.aten.sin.default
        return rewritten, records

    monkeypatch.setattr(PassManager, "run", planted)
    assert {op.name for op in unequal(pairs)} == {"cos"}


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_first_samples_are_as_listed(chunk: int) -> None:
    check(chunk, QUICK, TOGETHER)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_more_samples_are_as_listed(chunk: int) -> None:
    check(chunk, FULL, 1)


def check(chunk: int, limit: int, together: int) -> None:
    names = sorted(operators())[chunk::CHUNKS]
    found = {}
    for first in range(0, len(names), together):
        found |= disagreements(names[first : first + together], limit)
    if not same_version():
        # Another torch may refuse other samples; what it captures must be right all the same.
        found = {n: (a, b) for n, (a, b) in found.items() if "differs" in str(b) and "differs" not in str(a)}
    assert not found, f"run `python -m tests.operators --write` if this is meant; {TABLE.name} and reality: {found}"
