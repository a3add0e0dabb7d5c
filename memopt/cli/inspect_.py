"""memopt inspect: where a step's bytes go, as they are without a budget."""

from __future__ import annotations

from pathlib import Path

import click

import memopt
from memopt.budget import format_bytes
from memopt.cli.group import verbosity_options
from memopt.cli.loading import is_saved_model, load
from memopt.cli.model_options import ModelOptions, model_options
from memopt.cli.output import chosen_format, emit, output_options, progress, refuse_existing
from memopt.cli.printing import check_passes, print_options, print_passes
from memopt.cli.saved_model import inspect_folder
from memopt.report import ProgramReport, Report, render
from memopt.report.text import sparkline, title

_WIDTH = 72


@click.command()
@model_options
@print_options
@output_options
@verbosity_options
@click.pass_context
def inspect(
    ctx: click.Context,
    /,
    form: str | None,
    output: Path | None,
    overwrite: bool,
    print_after: tuple[str, ...],
    print_changed: bool,
    **options: object,
) -> None:
    """Show where the bytes of one step of MODEL go: breakdown, timeline, and the largest tensors at the peak.

    MODEL is a name of memopt.models (gpt2, resnet50:tiny, …), package.module:factory, where factory() returns
    (model, inputs), a Hugging Face folder, a .pt2, a .keras or .h5 file, or with --model a .safetensors or .pt state
    dict. A SavedModel of TensorFlow is compiled by XLA, and its memory and time are shown before and after.
    """
    wanted = ModelOptions.from_options(options)
    refuse_existing(output, overwrite)
    check_passes(print_after)
    path = Path(wanted.request.spec)
    if is_saved_model(path):
        with progress(ctx, f"compiling {path}"):
            text = inspect_folder(path, chosen_format(form, output), wanted.request.batch)
        emit(text, output)
        return
    with progress(ctx, f"inspecting {wanted.request.spec}"):
        loaded = load(wanted.request)
        report = memopt.plan(
            loaded.model, loaded.inputs, None, optimizer=wanted.optimizer(loaded.model), device=wanted.target
        )
    print_passes(report, print_after, print_changed)
    chosen = chosen_format(form, output)
    emit(_text(report) if chosen == "text" else render(report, chosen), output)


def _text(report: Report) -> str:
    lines = [title(report), "", str(report.breakdown)]
    for program in report.programs:
        lines += ["", *_timeline(program)]
    return "\n".join([*lines, *(f"note: {note}" for note in report.notes)]) + "\n"


def _timeline(program: ProgramReport) -> list[str]:
    values = program.timeline_after
    lines = [
        f"{program.name} ({program.kind}, {program.nodes} nodes): at most {format_bytes(max(values, default=0))}",
        sparkline(values, _WIDTH),
    ]
    width = min(len(values), _WIDTH)
    if 0 < program.forward_steps < len(values):
        forward = min(max(1, round(program.forward_steps / len(values) * width)), width - 1)
        rest = width - forward - 1
        lines.append(f"{'forward'[:forward]:─<{forward}}│{'backward'[:rest]:─<{rest}}")
    return lines
