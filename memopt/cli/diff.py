"""memopt diff: what changed between two models, two ONNX files, or two reports."""

from __future__ import annotations

from pathlib import Path

import click
import torch

from memopt.api import call_arguments
from memopt.cli.group import DIFFERENT, USAGE, CommandError, verbosity_options
from memopt.cli.loading import Request, load
from memopt.cli.onnx_source import load_onnx
from memopt.cli.output import chosen_format, emit, output_options, progress, refuse_existing
from memopt.difference.model_diff import ModelDiff, Side, compare_sides, side_of_onnx, side_of_programs, side_of_report
from memopt.report import load as load_report


@click.command()
@click.argument("before", metavar="A")
@click.argument("after", metavar="B")
@click.option("--stat", "summary", is_flag=True, help="Figures and operators only, without the nodes.")
@click.option("-U", "--context", type=click.IntRange(min=0), default=3, show_default=True, help="Lines around changes.")
@click.option("--exit-code", is_flag=True, help="Exit with 4 where they differ.")
@click.option("--train", is_flag=True, help="Of models: the joint graph of a training step, not inference.")
@click.option(
    "--batch", type=click.IntRange(min=1), default=2, show_default=True, help="Of models: examples in a step."
)
@click.option("--tiny", is_flag=True, help="The tiny size of models of memopt.models.")
@click.option("--model", "factory", metavar="PACKAGE.MODULE:FACTORY", help="The module that state dicts are for.")
@click.option("--trust-pickle", is_flag=True, help="Read files that may run code when read.")
@output_options
@verbosity_options
@click.pass_context
def diff(
    ctx: click.Context,
    /,
    before: str,
    after: str,
    summary: bool,
    context: int,
    exit_code: bool,
    train: bool,
    batch: int,
    tiny: bool,
    factory: str | None,
    trust_pickle: bool,
    form: str | None,
    output: Path | None,
    overwrite: bool,
) -> None:
    """Show what changed from A to B: figures, operators, and the nodes as a unified diff.

    A and B are two models (what `memopt compare` takes), two .onnx files, or two reports (.json). Nodes are aligned by
    what they compute, not by name; values of weights count. Random weights are drawn from one seed.

    Exit code 0 in either case; with --exit-code 4 where they differ.
    """
    refuse_existing(output, overwrite)
    kinds = [Path(spec).suffix.lower() for spec in (before, after)]
    for kind, words in ((".onnx", "an .onnx file"), (".json", "a report")):
        if kind in kinds and kinds[0] != kinds[1]:
            raise CommandError(
                f"{words} is compared with another one, not with {before if kinds[1] == kind else after}", USAGE
            )
    with progress(ctx, f"comparing {before} and {after}"):
        sides = []
        for spec, kind in zip((before, after), kinds, strict=True):
            if kind == ".onnx":
                sides.append(side_of_onnx(Path(spec).name, load_onnx(Path(spec))))
            elif kind == ".json":
                sides.append(_report(Path(spec)))
            else:
                request = Request(
                    spec=spec,
                    batch=batch,
                    tiny=tiny,
                    training=train and not spec.lower().endswith(".pt2"),
                    factory=factory if kind not in ("", ".pt2") else None,
                    trust_pickle=trust_pickle,
                )
                sides.append(_model(request))
        found = compare_sides(*sides)
    emit(_rendered(found, chosen_format(form, output), context, summary), output)
    if exit_code and not found.equal:
        raise CommandError(f"{before} and {after} differ", DIFFERENT)


def _rendered(found: ModelDiff, form: str, context: int, summary: bool) -> str:
    if form == "json":
        return found.to_json()
    return found.to_html(context) if form == "html" else found.to_text(context, summary=summary)


def _model(request: Request) -> Side:
    from memopt.difference.recorded import capture_programs

    torch.manual_seed(0)
    loaded = load(request)
    args, kwargs = call_arguments(loaded.inputs)
    programs = capture_programs(loaded.model, args, kwargs, training=request.training)
    return side_of_programs(request.spec, programs)


def _report(path: Path) -> Side:
    try:
        return side_of_report(path.name, load_report(path))
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or error}", USAGE) from error
    except ValueError as error:
        raise CommandError(str(error), USAGE) from error
