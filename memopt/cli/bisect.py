"""memopt bisect: which pass, and which of its rewrites, breaks a check."""

from __future__ import annotations

import dataclasses
import functools
import json
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from memopt.api import call_arguments
from memopt.cli.group import DIFFERENT, USAGE, CommandError, verbosity, verbosity_options
from memopt.cli.loading import Request, import_attribute, load
from memopt.cli.onnx_source import load_onnx
from memopt.cli.output import chosen_format, emit, output_options, progress, refuse_existing
from memopt.difference.bisect import BrokenBefore, Culprit, NothingToFind, Pipeline, Verdict
from memopt.difference.bisect import bisect as search
from memopt.pass_manager import Pass

_FORMATS = ("text", "json")
_CANNOT_RUN = (126, 127)  # a shell's words for a command that is not there or not executable


@click.command()
@click.argument("model", metavar="MODEL")
@click.option("--check", "command", metavar="COMMAND", help="Fails where it exits with other than 0; {} is the file.")
@click.option(
    "--tolerance",
    type=click.FloatRange(min=1),
    default=16.0,
    show_default=True,
    metavar="TIMES",
    help="Without --check: how many times the error against float64 may grow.",
)
@click.option("--passes", metavar="PACKAGE.MODULE:TUPLE", help="The pipeline. Default: the one that memopt runs.")
@click.option("--train", is_flag=True, help="The joint graph of a training step, not inference.")
@click.option("--batch", type=click.IntRange(min=1), default=2, show_default=True, help="Examples in a step.")
@click.option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N.")
@click.option("--tiny", is_flag=True, help="The tiny size of a model of memopt.models.")
@click.option("--model", "factory", metavar="PACKAGE.MODULE:FACTORY", help="The module a state dict is for.")
@click.option("--trust-pickle", is_flag=True, help="Read files that may run code when read.")
@click.option(
    "--keep",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Leave the files that COMMAND was given here.",
)
@functools.partial(output_options, formats=_FORMATS)
@verbosity_options
@click.pass_context
def bisect(
    ctx: click.Context,
    /,
    model: str,
    command: str | None,
    tolerance: float,
    passes: str | None,
    train: bool,
    batch: int,
    device: str | None,
    tiny: bool,
    factory: str | None,
    trust_pickle: bool,
    keep: Path | None,
    form: str | None,
    output: Path | None,
    overwrite: bool,
) -> None:
    """Find the rewrite of MODEL that breaks a check: halve the passes, then the changes within the guilty one.

    Without --check the check is that of the numbers: results against float64, before any pass and after. With it, every
    stage is written to a file, .pt2 or .onnx as MODEL is, and COMMAND is run with its name in place of {}.

    MODEL is what `memopt compare` takes, or an .onnx file.

    Exit code 0 where the check passes after all passes, 4 where a rewrite that breaks it was found, 1 where it fails
    before any pass.
    """
    if command is not None and "{}" not in command:
        raise CommandError("--check: write {} where the name of the file belongs", USAGE)
    if keep is not None and command is None:
        raise CommandError("--keep goes with --check", USAGE)
    refuse_existing(output, overwrite)
    pipeline = None if passes is None else _load_passes(passes)
    with tempfile.TemporaryDirectory(prefix="memopt-bisect-") as temporary, progress(ctx, f"bisecting {model}"):
        files = None if command is None else _Command(command, keep or Path(temporary), verbosity(ctx) > 0)
        if model.lower().endswith(".onnx"):
            if train or factory is not None or device is not None:
                raise CommandError("an .onnx file goes without --train, --model and --device", USAGE)
            cases = [_onnx_case(Path(model), pipeline, files, tolerance)]
        else:
            request = Request(
                spec=model,
                batch=batch,
                tiny=tiny,
                training=train,
                factory=factory,
                trust_pickle=trust_pickle,
                device=device,
            )
            cases = _program_cases(request, pipeline, files, tolerance)
        found = _searched(cases)
    json_asked = chosen_format(form, output, _FORMATS) == "json"
    emit(_json(found) if json_asked else _text(found), output)
    if found is not None:
        raise CommandError(f"pass {found.name} breaks the check", DIFFERENT)


Case = tuple[Any, Pipeline[Any], Callable[[Any, str], Verdict]]


def _searched(cases: Sequence[Case]) -> Culprit | None:
    for start, pipeline, check in cases:
        try:
            return search(start, pipeline, check)
        except NothingToFind:
            continue
        except BrokenBefore as error:
            raise CommandError(f"the check fails before any pass: {error}") from error
    return None


def _program_cases(
    request: Request, passes: Sequence[Any] | None, command: _Command | None, tolerance: float
) -> list[Case]:
    from memopt.difference.bisect_program import NumbersCheck, pipeline
    from memopt.difference.recorded import record_programs
    from memopt.passes import INFERENCE, TRAINING

    chosen = passes if passes is not None else TRAINING if request.training else INFERENCE
    _all_are(chosen, Pass)
    loaded = load(request)
    args, kwargs = call_arguments(loaded.inputs)
    recorded = record_programs(loaded.model, args, kwargs, training=request.training)
    if command is not None and len(recorded) > 1:
        raise CommandError(f"{request.spec} is {len(recorded)} graphs: --check takes one file, leave it", USAGE)
    cases: list[Case] = []
    for item in recorded:
        if command is None:
            check: Callable[[Any, str], Verdict] = NumbersCheck(item.program, item.values, tolerance)
        else:
            check = command.writer(".pt2", functools.partial(_save_program, item.values))
        cases.append((item.program, pipeline(chosen), check))
    return cases


def _save_program(values: Sequence[Any], program: Any, path: Path) -> None:
    from memopt.difference.bisect_program import save_program

    save_program(program, values, path)


def _onnx_case(path: Path, passes: Sequence[Any] | None, command: _Command | None, tolerance: float) -> Case:
    model = load_onnx(path)
    from memopt.onnx import STANDARD, OnnxModelError, OnnxPass
    from memopt.onnx.bisect import NumbersCheck, pipeline

    chosen = STANDARD if passes is None else passes
    _all_are(chosen, OnnxPass)
    try:
        check = NumbersCheck(model, tolerance=tolerance) if command is None else command.writer(".onnx", _save_onnx)
    except (OnnxModelError, ValueError) as error:
        raise CommandError(f"{path}: {error}") from error
    return model, pipeline(chosen), check


def _save_onnx(model: Any, path: Path) -> None:
    import onnx_ir as ir

    from memopt.onnx.read import weight_bytes

    beside = f"{path.name}.data" if weight_bytes(model) > 1 << 30 else None  # a file of protobuf holds at most 2 GB
    ir.save(model, path, external_data=beside)


class _Command:
    """The user's command, run on a file for each stage."""

    def __init__(self, command: str, folder: Path, shown: bool) -> None:
        self._command, self._folder, self._shown = command, folder, shown

    def writer(self, suffix: str, write: Callable[[Any, Path], None]) -> Callable[[Any, str], Verdict]:
        """A check that writes its subject and runs the command."""

        def check(subject: Any, stage: str) -> Verdict:
            path = self._folder / f"{stage}{suffix}"
            write(subject, path)
            return self._run(path)

        return check

    def _run(self, path: Path) -> Verdict:
        command = self._command.replace("{}", shlex.quote(str(path)))
        done = subprocess.run(command, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if self._shown:
            click.echo(done.stdout, err=True, nl=False)
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        if done.returncode in _CANNOT_RUN:
            raise CommandError(f"--check cannot be run: {lines[-1] if lines else command}")
        said = f": {lines[-1]}" if lines else ""
        return Verdict(done.returncode == 0, f"exit code {done.returncode}{said}")


def _load_passes(spec: str) -> tuple[Any, ...]:
    found = import_attribute(spec, "TUPLE", option="--passes: ")
    if not isinstance(found, tuple | list):
        raise CommandError(f"--passes: {spec} is no tuple of passes", USAGE)
    return tuple(found)


def _all_are(passes: Sequence[Any], kind: type) -> None:
    for item in passes:
        if not isinstance(item, kind):
            raise CommandError(f"--passes: {item!r} is no {kind.__name__}, which MODEL needs", USAGE)


def _json(found: Culprit | None) -> str:
    content = {"format": "memopt bisection", "version": 1, "found": found is not None}
    return json.dumps(content if found is None else {**content, **dataclasses.asdict(found)}, indent=1) + "\n"


def _text(found: Culprit | None) -> str:
    if found is None:
        return "nothing to find: the check passes after all passes\n"
    lines = [f"pass {found.name} ({found.number} of {found.count}): {found.words}"]
    rewrite = found.rewrite
    if rewrite is None:
        lines.append(f"no single rewrite: {found.reason}")
    else:
        what = "; ".join(rewrite.summaries) or f"{', '.join(rewrite.before)} became {', '.join(rewrite.after)}"
        lines.append(f"rewrite {rewrite.number} of {rewrite.count}: {what}")
        lines.append(f"nodes before: {', '.join(rewrite.before) or 'none'}")
        lines.append(f"nodes after:  {', '.join(rewrite.after) or 'none'}")
        if rewrite.alone:
            lines.append("it fails with this rewrite alone")
        lines += ["", rewrite.text.rstrip("\n")] if rewrite.text else []
    lines.append(f"{found.checks} checks")
    return "\n".join(lines) + "\n"
