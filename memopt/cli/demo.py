"""memopt demo: the main job on built-in models, start to finish."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table

from memopt.budget import format_bytes
from memopt.cli.demo_run import CASES, SHARES, Case, Row, gpu_cases, run_case
from memopt.cli.group import DIFFERENT, FAILED, USAGE, CommandError, verbosity, verbosity_options

_PLAIN_WIDTH = 132


@click.command()
@click.option("--gpu", is_flag=True, help="Larger models, on this machine's CUDA device, as code of Inductor's.")
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
def demo(ctx: click.Context, gpu: bool, seed: int, report_dir: Path, form: str) -> None:
    """Train a GPT and a ResNet inside 60 % and 45 % of the memory that they take, and check the gradients.

    Runs on the CPU, or with --gpu on a CUDA device, with batches that it has room for. Peaks are measured from the
    allocator's own events (on CUDA: what it reserves); gradients are compared with eager PyTorch's, under the same
    seed; on the CPU with dropout.
    """
    if gpu and not torch.cuda.is_available():
        raise CommandError("demo --gpu: torch sees no CUDA device here; memopt demo runs on the CPU", USAGE)
    started = time.perf_counter()
    report_dir.mkdir(parents=True, exist_ok=True)
    spoken = form == "text" and verbosity(ctx) >= 0
    cases = _cases_of_device() if gpu else CASES
    expected = sum(sum(case.expected) for case in cases)
    if spoken and (expected or gpu):
        place = torch.cuda.get_device_name() if gpu else "this CPU"
        duration = "Some minutes: code is compiled." if gpu else f"About {expected} s on two idle cores."
        click.echo(f"Training on {place}: plain PyTorch first, then within budgets. {duration}")
    rows: list[Row] = []
    for case in cases:
        rows += _announced(run_case(case, seed, report_dir), case) if spoken else run_case(case, seed, report_dir)
    seconds = time.perf_counter() - started
    code, verdict = _verdict(rows)
    if form == "json":
        document = {"seed": seed, "seconds": seconds, "rows": [dataclasses.asdict(row) for row in rows]}
        click.echo(json.dumps(document, indent=1))
    else:
        _print_table(rows)
        if code == 0:
            click.echo(_SHOWN)
    click.echo(
        f"{verdict} ({seconds:.0f} s). Reports: {report_dir / '*.html'} and {report_dir / '*.json'}", err=form == "json"
    )
    ctx.exit(code)


def _cases_of_device() -> Sequence[Case]:
    torch.backends.cudnn.allow_tf32 = False  # what differs is to be memopt's alone
    return gpu_cases(torch.cuda.mem_get_info()[0])


_SHOWN = """\
Shown: whole training steps, weights, gradients and optimizer state included, within a budget that plain PyTorch
exceeds; part of the activations is recomputed in backward, so a step takes longer and its gradients are the same.
Next:  memopt plan gpt2 --budget 8GB --batch 4      what would be done for a larger model, and whether it fits
       model = memopt.compile(model, budget="20GB", optimizer=optimizer)      in your own training script"""


def _announced(rows: Iterator[Row], case: Case) -> Iterator[Row]:
    """The rows of a case, each said before it is measured and when it is."""
    for setting, expected in itertools.zip_longest(("eager", *(f"{share:.0%}" for share in SHARES)), case.expected):
        what = "measuring" if setting == "eager" else "planning and measuring"
        click.echo(f"{case.label}, {setting}: {what}" + ("" if expected is None else f", about {expected} s"))
        began, row = time.perf_counter(), next(rows, None)
        if row is None:
            return
        peak = format_bytes(row.measured_bytes, short=True)
        limit = "" if row.budget_bytes is None else f" of {format_bytes(row.budget_bytes, short=True)}"
        step = f"peak {peak}{limit}, step {row.seconds * 1e3:.0f} ms"
        click.echo(f"  {row.setting}: {step}, {row.verdict} ({time.perf_counter() - began:.0f} s)")
        yield row


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
