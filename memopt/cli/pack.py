"""memopt pack: where each buffer of a list goes in one arena."""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path

import click

from memopt.budget import parse_budget
from memopt.cli.group import BUDGET, USAGE, CommandError, verbosity, verbosity_options
from memopt.cli.output import chosen_format, emit, output_options, progress, refuse_existing
from memopt.solve.pack import Packing
from memopt.solve.pack import pack as place
from memopt.solve.pack_csv import CsvError, Table, read_table

_FORMATS = ("text", "json")


def _bytes(ctx: click.Context, option: click.Parameter, value: str | None) -> int | None:
    """Read a number of bytes: plain digits, or a size such as 64KiB."""
    if value is None or (value.isascii() and value.isdigit()):
        return None if value is None else int(value)
    try:
        size = parse_budget(value).bytes
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    if size is None:
        raise click.BadParameter(f"{value}: a share of what? Say a number of bytes, or a size like 64KiB")
    return size


@click.command()
@click.argument("source", metavar="BUFFERS.CSV", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--capacity", callback=_bytes, metavar="N", help="Bytes of the arena, or 64KiB. Default: the least.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to search at most.",
)
@functools.partial(output_options, formats=_FORMATS, text="text: the CSV with offsets.")
@verbosity_options
@click.pass_context
def pack(
    ctx: click.Context,
    /,
    source: Path,
    capacity: int | None,
    timeout: float,
    form: str | None,
    output: Path | None,
    overwrite: bool,
) -> None:
    """Place buffers in one arena so that those alive together share no byte.

    BUFFERS.CSV is as google/minimalloc reads it: columns id, lower, upper and size, and where wanted alignment; lives
    are half-open, sizes are bytes. What is written is the same with a column offset.

    Exit code 3 where the buffers do not fit in --capacity, or no way was found in time; nothing is written then.
    """
    refuse_existing(output, overwrite)
    table = _read(source)
    started = time.monotonic()
    with progress(ctx, f"packing {len(table.buffers)} buffers"):
        try:
            packing = place(table.buffers, capacity, timeout)
        except ValueError as error:
            raise CommandError(f"{source}: {error}", USAGE) from error
    if capacity is not None and packing.size > capacity:
        raise CommandError(_misfit(packing, capacity, timeout), BUDGET)
    json_asked = chosen_format(form, output, _FORMATS) == "json"
    emit(_json(table, packing, capacity) if json_asked else table.with_offsets(packing.offsets), output)
    if verbosity(ctx) >= 0:
        bound = "the least possible" if packing.optimal else f"none takes less than {packing.lower_bound:,}"
        seconds = time.monotonic() - started
        click.echo(f"{len(table.buffers):,} buffers in {packing.size:,} bytes ({bound}), {seconds:.1f} s", err=True)


def _read(source: Path) -> Table:
    try:
        return read_table(source.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise CommandError(f"{source}: no text in UTF-8 ({error.reason} at byte {error.start})", USAGE) from error
    except CsvError as error:
        raise CommandError(f"{source}: {error}", USAGE) from error


def _misfit(packing: Packing, capacity: int, timeout: float) -> str:
    if packing.lower_bound > capacity:
        return f"the buffers cannot fit in {capacity:,} bytes: they provably need at least {packing.lower_bound:,}"
    return (
        f"no way to fit the buffers in {capacity:,} bytes was found in {timeout:g} s, and none is ruled out: the best "
        f"found takes {packing.size:,}, the proved lower bound is {packing.lower_bound:,}; allow a longer --timeout"
    )


def _json(table: Table, packing: Packing, capacity: int | None) -> str:
    rows = zip(table.ids, table.buffers, packing.offsets, strict=True)
    buffers = [{"id": name, **buffer._asdict(), "offset": offset} for name, buffer, offset in rows]
    figures = {
        "capacity": capacity,
        "size": packing.size,
        "lower_bound": packing.lower_bound,
        "optimal": packing.optimal,
        "buffers": buffers,
    }
    return json.dumps(figures, indent=1) + "\n"
