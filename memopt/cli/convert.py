"""memopt convert: a checkpoint becomes a verified ONNX file."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from memopt.cli.group import DIFFERENT, USAGE, CommandError, verbosity, verbosity_options
from memopt.cli.loading import Request, is_keras, is_saved_model, load
from memopt.cli.output import progress, refuse_existing
from memopt.cli.printing import check_passes, print_options, printing_onnx
from memopt.cli.saved_model import convert_folder
from memopt.cli.to_tensorflow import to_tensorflow
from memopt.report import write_whole

if TYPE_CHECKING:
    from memopt.convert.record import Conversion

# What says how an ONNX file is made; the other options are about the source, or about any output.
_ONNX_ONLY = (
    "opset", "target", "level", "passes", "skip", "explain", "allow_larger", "dtype", "quantize", "tolerance",
    "measure", "report", "print_after", "print_changed",
)  # fmt: skip


# Names of files of other kinds: what reads them by their names would fail.
_OTHER_FORMS = (
    ".safetensors",
    ".pt",
    ".pth",
    ".bin",
    ".ckpt",
    ".pt2",
    ".pb",
    ".keras",
    ".h5",
    ".tflite",
    ".json",
    ".html",
)


@click.command()
@click.argument("source", metavar="SOURCE")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The ONNX file, or the SavedModel, to write.")
@click.option(
    "--to",
    "form_out",
    type=click.Choice(["onnx", "tensorflow"]),
    default="onnx",
    show_default=True,
    help="What to write: an ONNX file, or a SavedModel folder of TensorFlow.",
)
@click.option("--overwrite", is_flag=True, help="Replace the output file if it exists.")
@click.option("--dry-run", is_flag=True, help="Convert and verify, but write nothing.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", help="Of what is printed.")
@click.option("--input", "inputs", multiple=True, metavar="NAME=2x3x224x224:float32", help="An input; repeatable.")
@click.option("--dynamic", metavar="AXES", help="Which axes vary: batch,sequence or x:0=rows; none: fixed shapes.")
@click.option("--opset", type=click.IntRange(18, 25), help="ONNX operators' version.  [default: 20]")
@click.option(
    "--target",
    type=click.Choice(["standard", "onnxruntime", "onnxruntime-cuda"]),
    default="standard",
    show_default=True,
    help="Standard operators only, or ONNX Runtime's own as well: all, or those that pay on CUDA.",
)
@click.option("--model", "factory", metavar="PACKAGE.MODULE:FACTORY", help="The module a state dict is for.")
@click.option("--key", metavar="NAME.NAME", help="Where in a nested checkpoint the weights are: ema, state.model.")
@click.option("--task", metavar="TASK", help="The head of a Hugging Face model: text-classification, …")
@click.option(
    "-O",
    "level",
    type=click.IntRange(0, 3),
    default=2,
    show_default=True,
    help="0: no pass … 3: again, till nothing changes.",
)
@click.option("--passes", metavar="NAME,NAME", help="These passes on the ONNX graph, in this order.")
@click.option("--skip", multiple=True, metavar="PASS", help="Leave this pass out; repeatable.")
@click.option("--explain", is_flag=True, help="List every rewrite that was refused, with its node and the reason.")
@click.option("--allow-larger", is_flag=True, help="Let an ONNX file come out larger than it went in.")
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "fp16", "bf16"]),
    help="Lower precision, sensitive operators in float32; fp32: a checkpoint of lower precision widened.",
)
@click.option("--quantize", type=click.Choice(["int8"]), help="Weights of matrix products in int8.")
@click.option(
    "--tolerance", type=float, metavar="SHARE", help="With --dtype or --quantize: of an output's largest value."
)
@click.option("--measure/--no-measure", default=True, help="Run the graph before and after for memory and time.")
@click.option("--report", type=click.Path(dir_okay=False, path_type=Path), help="Write the record: .html, .json, .txt.")
@click.option("--tiny", is_flag=True, help="The tiny size of a model of memopt.models.")
@click.option("--trust-pickle", is_flag=True, help="Read files that may run code when read.")
@print_options
@verbosity_options
@click.pass_context
def convert(
    ctx: click.Context,
    /,
    source: str,
    output: Path | None,
    overwrite: bool,
    dry_run: bool,
    form: str,
    inputs: tuple[str, ...],
    dynamic: str | None,
    form_out: str,
    explain: bool,
    factory: str | None,
    key: str | None,
    task: str | None,
    tiny: bool,
    trust_pickle: bool,
    report: Path | None,
    print_after: tuple[str, ...],
    print_changed: bool,
    **how: Any,
) -> None:
    """Convert SOURCE to an ONNX file that computes the same, proved by real runs at several shapes.

    SOURCE is a name of memopt.models (gpt2, resnet50:tiny, …), package.module:factory, a Hugging Face folder, a .pt2 of
    torch.export, a .keras or .h5 file of Keras 3, a SavedModel folder of TensorFlow, an .onnx file, or with --model a
    .safetensors, .pt, .pth or .bin state dict.
    """
    if (output is None) != dry_run:
        raise CommandError("say where to: -o model.onnx, or --dry-run (not both)", USAGE)
    if form_out == "onnx" and output is not None:
        _refuse_other_forms(output)
    refuse_existing(output, overwrite)
    refuse_existing(report, overwrite)
    if report is not None and report.suffix.lower() not in (".html", ".json", ".txt"):
        raise CommandError(f"{report}: a report is .html, .json or .txt", USAGE)
    request = Request(
        spec=source,
        tiny=tiny,
        training=False,
        factory=factory,
        key=key,
        task=task,
        trust_pickle=trust_pickle,
        needs_inputs=False,
    )
    if form_out == "tensorflow":
        _refuse_onnx_options(ctx)
        with progress(ctx, f"converting {source}"):
            exported = to_tensorflow(request, output, inputs, dynamic, overwrite=overwrite)
        click.echo(exported.to_json() if form == "json" else exported.to_text(), nl=False)
        if output is not None:
            click.echo(f"written to {output}", err=True)
        return
    check_passes(print_after, _onnx_passes())
    with printing_onnx(print_after, print_changed), steps(ctx, f"converting {source}") as notify:
        record = _converted(request, output, inputs, dynamic, {**how, "notify": notify})
    click.echo(record.to_json() if form == "json" else record.to_text(explain=explain), nl=False)
    if report is not None:
        write_whole(report, _rendered(record, report.suffix.lower()))
        click.echo(f"written to {report}", err=True)
    if output is not None:
        click.echo(f"written to {output}", err=True)


def _refuse_other_forms(output: Path) -> None:
    """Refuse a folder, and a name that says of an ONNX file that it is something else."""
    if output.is_dir():
        raise CommandError(
            f"{output} is a folder: an ONNX file is written, or with --to tensorflow a SavedModel", USAGE
        )
    if output.suffix.lower() in _OTHER_FORMS:
        raise CommandError(f"{output} is written as an ONNX file: let its name end in .onnx", USAGE)


def _refuse_onnx_options(ctx: click.Context) -> None:
    for parameter in ctx.command.params:
        given = ctx.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
        if given and parameter.name in _ONNX_ONLY:
            raise CommandError(f"{parameter.opts[0]} goes with ONNX files, not with --to tensorflow", USAGE)


def _onnx_passes() -> list[str]:
    """The names of the passes on ONNX graphs; none without the extra: the conversion says then what is missing."""
    try:
        from memopt.onnx import ONNXRUNTIME, STANDARD
    except ImportError:
        return []
    return [item.name for item in (*STANDARD, *ONNXRUNTIME)]


def _extra(spec: str) -> str:
    """The extras that make an ONNX file of a source, all at once: what they bring would be missed one after another."""
    path = Path(spec)
    if is_keras(spec) or is_saved_model(path):
        return "tensorflow"
    return "onnx,hf" if path.is_dir() or path.suffix.lower() == ".safetensors" else "onnx"


def _rendered(record: Conversion, suffix: str) -> str:
    from memopt.convert.page import to_html

    if suffix == ".html":
        return to_html(record)
    return record.to_json() if suffix == ".json" else record.to_text(explain=True)


def _converted(
    request: Request, output: Path | None, inputs: tuple[str, ...], dynamic: str | None, how: Mapping[str, Any]
) -> Conversion:
    try:
        from memopt.cli.conversion_inputs import conversion_inputs
        from memopt.convert.arrays import to_array
        from memopt.convert.capture import from_exported
        from memopt.convert.errors import ConversionError, DifferenceError
        from memopt.convert.from_onnx import convert_onnx
        from memopt.convert.inputs import KNOWN_AXES, Dynamic, parse_dynamic, parse_inputs
        from memopt.convert.options import make_options
        from memopt.convert.pipeline import convert_captured, convert_module
    except ImportError as error:
        extra = f"pip install memopt[{_extra(request.spec)}]"
        raise CommandError(f"converting needs {error.name or error}: {extra}") from error
    try:
        specs = parse_inputs(inputs)
        axes = None if dynamic is None else parse_dynamic(dynamic)
        names = None if how["passes"] is None else [name for name in how["passes"].split(",") if name]
        options = make_options(**{**how, "passes": names}, consume=True)
        path = Path(request.spec)
        if path.suffix.lower() == ".onnx":
            if axes is not None:
                raise CommandError(f"{path} has shapes of its own: leave --dynamic", USAGE)
            if not path.is_file():
                raise CommandError(f"no file {path}", USAGE)
            arrays = {spec.name: to_array(spec.make()) for spec in specs}
            return convert_onnx(path, output, inputs=arrays or None, options=options)
        if is_saved_model(path):
            return convert_folder(path, output, specs, axes, options)
        if is_keras(request.spec):
            shapes = {spec.name: spec.shape for spec in specs}
            request, specs = dataclasses.replace(request, shapes=shapes, dynamic=axes is None), []
            axes = None if axes == Dynamic(()) else axes
        loaded = load(request)
        if loaded.exported is not None:
            if specs or axes is not None:
                raise CommandError(
                    f"{loaded.name} has inputs and shapes of its own: leave --input and --dynamic", USAGE
                )
            captured = from_exported(loaded.exported, {**KNOWN_AXES, **loaded.labels})
            captured = dataclasses.replace(captured, notes=(*captured.notes, *loaded.notes))
            return convert_captured(captured, output, source=loaded.name, options=options)
        example = conversion_inputs(loaded, specs)
        return convert_module(loaded.model, example, output, source=loaded.name, dynamic=axes, options=options)
    except DifferenceError as error:
        raise CommandError(str(error), DIFFERENT) from error
    except ConversionError as error:
        raise CommandError(str(error)) from error
    except ValueError as error:
        raise CommandError(str(error), USAGE) from error
    except OSError as error:
        if output is None:
            raise
        raise CommandError(f"{output} was not written: {error.strerror or error}") from error


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
