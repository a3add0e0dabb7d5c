"""--print-after and --print-changed: what the passes made of a graph, on stderr; stdout is for the data."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import click

from memopt.cli.group import USAGE, CommandError
from memopt.passes import INFERENCE, TRAINING
from memopt.report import Report
from memopt.report.listing import change, listing, record_texts


def print_options(command: Any) -> Any:
    """Add --print-after and --print-changed to a verb."""
    for option in (
        click.option("--print-changed", is_flag=True, help="Show what each pass changed, as a diff, on stderr."),
        click.option("--print-after", multiple=True, metavar="PASS", help="Show the graph after it, on stderr."),
    ):
        command = option(command)
    return command


def check_passes(asked: Sequence[str], known: Collection[str] | None = None) -> None:
    """Raise CommandError where a pass that is asked for does not exist; by default those on programs do."""
    names = dict.fromkeys((item.name for item in (*INFERENCE, *TRAINING)) if known is None else known)
    for name in asked:
        if names and name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise CommandError(f"--print-after: no pass {name!r}{hint}; there are {', '.join(names)}", USAGE)


def print_passes(report: Report, after: Sequence[str], changed: bool) -> None:
    """Print what was asked for of a report's passes."""
    for text in record_texts(report.passes, after, changed):
        click.echo(text, err=True)
    ran = {record.name for record in report.passes}
    for name in after:
        if name not in ran:
            click.echo(f"# {name} did not run", err=True)


@contextlib.contextmanager
def printing_onnx(after: Sequence[str], changed: bool) -> Iterator[None]:
    """Print what was asked for of the ONNX passes that run in the block, at its end, however it ends."""
    if not after and not changed:
        yield
        return
    from memopt.onnx.nodes import graph_nodes
    from memopt.onnx.observe import observing

    texts: list[str] = []

    def see(name: str, old: Any, new: Any) -> None:
        if changed and new is not old:
            texts.append(change(graph_nodes(old), graph_nodes(new), name))
        if name in after:
            texts.append(listing(graph_nodes(new), f"after {name}"))

    try:
        with observing(see):
            yield
    finally:
        for text in texts:
            click.echo(text, err=True)
