"""Where a verb's words go: data to stdout or to a file, progress to stderr."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from memopt.cli.group import USAGE, CommandError, verbosity
from memopt.report import write_whole

FORMATS = ("text", "json", "html")
_SUFFIXES = {".json": "json", ".html": "html", ".txt": "text"}


def output_options(command: Any, formats: Sequence[str] = FORMATS, text: str = "") -> Any:
    """Add --format, -o/--output and --overwrite to a verb.

    Args:
        command: the verb.
        formats: those that it has.
        text: what it writes as text, where that is no table for people.
    """
    words = f"{text} Default: what the output's suffix says, else text.".strip()
    for option in (
        click.option("--overwrite", is_flag=True, help="Replace the output file if it exists."),
        click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write here, not stdout."),
        click.option("--format", "form", type=click.Choice(formats), help=words),
    ):
        command = option(command)
    return command


def chosen_format(form: str | None, output: Path | None, formats: Sequence[str] = FORMATS) -> str:
    """The format asked for, or that of the verb's which the output's suffix means, or text."""
    meant = _SUFFIXES.get(output.suffix.lower(), "text") if output else "text"
    return form or (meant if meant in formats else "text")


def refuse_existing(output: Path | None, overwrite: bool) -> None:
    """Raise CommandError, before any work is done, where the output could not be written."""
    if output is None:
        return
    if output.exists() and not overwrite:
        raise CommandError(f"{output} exists: choose another name or add --overwrite", USAGE)
    if not output.parent.is_dir():
        raise CommandError(f"the folder of {output} does not exist", USAGE)
    if not os.access(output.parent, os.W_OK):
        raise CommandError(f"{output} cannot be written: its folder is read-only", USAGE)


def emit(text: str, output: Path | None) -> None:
    """Print the data, or write it to the file, whole or not at all; then say where on stderr."""
    if output is None:
        click.echo(text, nl=not text.endswith("\n"))
        return
    write_whole(output, text)
    click.echo(f"written to {output}", err=True)


@contextlib.contextmanager
def progress(ctx: click.Context, what: str) -> Iterator[None]:
    """A spinner on stderr while a block runs; nothing where stderr is no terminal, or with -q."""
    if not sys.stderr.isatty() or verbosity(ctx) < 0:
        yield
        return
    with Console(stderr=True).status(what):
        yield
