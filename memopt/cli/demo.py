"""memopt demo: the main job on built-in models, start to finish."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from memopt.budget import format_bytes
from memopt.cli.demo_run import CASES, Row, run_case
from memopt.cli.group import DIFFERENT, FAILED, verbosity_options
from memopt.cli.output import progress

_PLAIN_WIDTH = 132


@click.command()
@click.option("--seed", type=int, default=0, show_default=True, help="Of the weights, the batch and dropout.")
@click.option(
    "--report-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("memopt-report"),
    show_default=True,
    help="Where the reports go; those of an earlier demo are replaced.",
)
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@verbosity_options
@click.pass_context
def demo(ctx: click.Context, seed: int, report_dir: Path, form: str) -> None:
    """Train a GPT and a ResNet inside 60 % and 40 % of the memory that they take, and check the gradients.

    Runs on the CPU. Peaks are measured from the allocator's own events; gradients are compared with eager PyTorch's,
    under the same seed, dropout on.
    """
    started = time.perf_counter()
    report_dir.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for case in CASES:
        with progress(ctx, f"{case.label}: measuring, planning, measuring again"):
            rows += run_case(case, seed, report_dir)
    seconds = time.perf_counter() - started
    if form == "json":
        document = {"seed": seed, "seconds": seconds, "rows": [dataclasses.asdict(row) for row in rows]}
        click.echo(json.dumps(document, indent=1))
    else:
        _print_table(rows)
    code, verdict = _verdict(rows)
    click.echo(
        f"{verdict} ({seconds:.0f} s). Reports: {report_dir / '*.html'} and {report_dir / '*.json'}", err=form == "json"
    )
    ctx.exit(code)


def _verdict(rows: Sequence[Row]) -> tuple[int, str]:
    """The exit code, and the last line's words: wrong numbers weigh more than a broken budget."""
    found = {row.verdict for row in rows}
    if "numbers differ" in found:
        return DIFFERENT, "FAILED: gradients differ from eager PyTorch's"
    if "over budget" in found:
        return FAILED, "FAILED: a measured peak is above its budget"
    return 0, "PASSED: every measured peak is within its budget, every gradient equals eager PyTorch's"


def _print_table(rows: Sequence[Row]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PLAIN_WIDTH)
    table = Table()
    for heading in ("model", "setting"):
        table.add_column(heading)
    for heading in ("budget", "predicted peak", "measured peak", "of eager", "step", "gradient error"):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    baseline = 0
    for row, following in itertools.zip_longest(rows, rows[1:]):
        if row.verdict == "baseline":
            baseline = row.measured_bytes
        table.add_row(
            row.model if row.verdict == "baseline" else "",
            row.setting,
            "" if row.budget_bytes is None else format_bytes(row.budget_bytes, short=True),
            "" if row.predicted_bytes is None else format_bytes(row.predicted_bytes, short=True),
            format_bytes(row.measured_bytes, short=True),
            f"{row.measured_bytes / baseline:.0%}",
            f"{row.seconds * 1e3:.0f} ms",
            "" if row.gradient_error is None else f"{row.gradient_error:.1e}",
            row.verdict,
            end_section=following is not None and following.verdict == "baseline",
        )
    console.print(table)
