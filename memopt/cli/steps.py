"""A bar on stderr that moves on with every step of a long command."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from memopt.cli.group import verbosity


@contextlib.contextmanager
def steps(ctx: click.Context, what: str) -> Iterator[Callable[[str], None]]:
    """Give a function to call with the name of each step as it begins.

    How many there will be is not known beforehand: the bar says which step runs, the how-manieth, and since when.
    Nothing is shown where stderr is no terminal, or with -q.
    """
    if not sys.stderr.isatty() or verbosity(ctx) < 0:
        yield lambda step: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("step {task.completed}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)

        def begin(step: str) -> None:
            bar.update(task, description=f"{what}: {step}", advance=1)

        yield begin
