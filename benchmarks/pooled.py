"""Rows of tables in processes of a pool: a budget's rows begin once its reference is known."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from memopt.comparison.job import Job
from memopt.comparison.pool import Pool


class Table(Protocol):
    """One model's rows."""

    def jobs(self) -> dict[str, Job]:
        """Those that can begin, by row."""

    def take(self, row: str, said: dict[str, Any]) -> None:
        """Note what a row's process said in the end."""


T = TypeVar("T", bound=Table)


def fill(tables: Sequence[T], pool: Pool, line: Callable[[T, str], str]) -> None:
    """Run the tables' rows, one table after the other, and print each with its line as soon as it has ended."""
    started = time.perf_counter()
    owners: dict[int, tuple[T, str]] = {}

    def add(table: T, ahead: bool = False) -> None:
        begun = {row for owner, row in owners.values() if owner is table}
        new = {row: job for row, job in table.jobs().items() if row not in begun}
        owners.update(zip(pool.add(list(new.values()), ahead=ahead), ((table, row) for row in new), strict=True))

    for table in tables:
        add(table)
    for number, said in pool.run():
        table, row = owners[number]
        table.take(row, said)
        print(f"{time.perf_counter() - started:4.0f} s {line(table, row)}", flush=True)
        add(table, ahead=True)
