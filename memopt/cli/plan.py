"""memopt plan: what would be done to fit a budget, and whether it fits."""

from __future__ import annotations

from pathlib import Path

import click

import memopt
from memopt.budget import parse_budget
from memopt.cli.group import USAGE, CommandError, verbosity_options
from memopt.cli.loading import load
from memopt.cli.model_options import ModelOptions, model_options
from memopt.cli.output import chosen_format, emit, output_options, progress, refuse_existing
from memopt.cli.printing import check_passes, print_options, print_passes
from memopt.report import render


@click.command()
@model_options
@click.option("--budget", metavar="SIZE", help="The limit: 8GB, 8GiB, a share of the peak: 60%. Default: every one.")
@print_options
@output_options
@verbosity_options
@click.pass_context
def plan(
    ctx: click.Context,
    /,
    budget: str | None,
    form: str | None,
    output: Path | None,
    overwrite: bool,
    print_after: tuple[str, ...],
    print_changed: bool,
    **options: object,
) -> None:
    """Say what would be done to run a step of MODEL within a budget, without running one.

    Without --budget: which budget would cost how much time.

    MODEL is a name of memopt.models (gpt2, resnet50:tiny, …), package.module:factory, where factory() returns
    (model, inputs), a Hugging Face folder, a .keras or .h5 file of Keras 3 (inference), or with --model a .safetensors
    or .pt state dict.
    """
    wanted = ModelOptions.from_options(options)
    try:
        limit = "every budget" if budget is None else parse_budget(budget).text
    except ValueError as error:
        raise CommandError(str(error), USAGE) from error
    refuse_existing(output, overwrite)
    check_passes(print_after)
    with progress(ctx, f"planning {wanted.request.spec} for {limit}"):
        loaded = load(wanted.request)
        report = memopt.plan(
            loaded.model, loaded.inputs, budget, optimizer=wanted.optimizer(loaded.model), device=wanted.target
        )
    print_passes(report, print_after, print_changed)
    chosen = chosen_format(form, output)
    emit(render(report, "curve" if budget is None and chosen == "text" else chosen), output)
