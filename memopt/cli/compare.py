"""memopt compare: one model on every engine, measured here, each engine in a process of its own."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import click
import torch

from memopt.backends.by_name import BACKENDS
from memopt.cli.group import DIFFERENT, FAILED, USAGE, CommandError, verbosity_options
from memopt.cli.loading import Request, load
from memopt.cli.output import chosen_format, emit, output_options, progress, refuse_existing
from memopt.comparison.job import Job, Source
from memopt.comparison.progress import Case
from memopt.comparison.record import Comparison
from memopt.comparison.run import compare_cases
from memopt.comparison.steps import OPTIMIZERS, PEERS, Engine


@click.command()
@click.argument("model", metavar="MODEL")
@click.option("--backends", default=",".join(BACKENDS), show_default=True, metavar="LIST", help="memopt's engines.")
@click.option("--peers", default="eager,compile", show_default=True, metavar="LIST", help="Beside them; all, or none.")
@click.option("--train", is_flag=True, help="A training step, not a forward pass in eval mode.")
@click.option("--optimizer", type=click.Choice([*OPTIMIZERS]), help="What steps in a training step. Default: nothing.")
@click.option("--budget", "budgets", metavar="LIST", help="Budgets of training: each engine at each: 8GB,60%.")
@click.option("--batch", type=click.IntRange(min=1), default=2, show_default=True, help="Examples in a step.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Of parameters and inputs.")
@click.option("--device", default="cpu", show_default=True, metavar="DEVICE", help="cpu, cuda or cuda:N.")
@click.option("--repeats", type=click.IntRange(min=1), default=20, show_default=True, help="Steps that are timed.")
@click.option("--warmup", type=click.IntRange(min=0), default=3, show_default=True, help="Steps before them.")
@click.option("--timeout", type=click.FloatRange(min=1), default=600.0, show_default=True, help="Seconds for one row.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Rows prepared at once.")
@click.option("--keep-caches", is_flag=True, help="Let compilers find what earlier runs left.")
@click.option("--tiny", is_flag=True, help="The tiny size of a model of memopt.models.")
@click.option("--model", "factory", metavar="PACKAGE.MODULE:FACTORY", help="The module a state dict is for.")
@click.option("--trust-pickle", is_flag=True, help="Read files that may run code when read.")
@output_options
@verbosity_options
@click.pass_context
def compare(
    ctx: click.Context,
    /,
    model: str,
    backends: str,
    peers: str,
    train: bool,
    optimizer: str | None,
    budgets: str | None,
    batch: int,
    dtype: str | None,
    device: str,
    tiny: bool,
    factory: str | None,
    trust_pickle: bool,
    form: str | None,
    output: Path | None,
    overwrite: bool,
    **how: Any,
) -> None:
    """Run MODEL on several engines, one after another, and show time, memory and error of each.

    Every engine has a process of its own, and compiles from nothing. One that is missing, fails, crashes or takes too
    long is a row that says why. Errors are taken against PyTorch in float64.

    MODEL is a name of memopt.models (gpt2, resnet50:tiny, …), package.module:factory, where factory() returns
    (model, inputs), a Hugging Face folder, a .pt2 (inference), or with --model a .safetensors or .pt state dict.

    Peers: eager, compile (torch.compile), compile:0.5 (with that activation_memory_budget), checkpoint (every block in
    torch.utils.checkpoint).

    Exit code 1 where no engine ran, 4 where the numbers of one differ by more than rounding explains.
    """
    refuse_existing(output, overwrite)
    if train and model.lower().endswith(".pt2"):
        raise CommandError(f"{model} keeps forward only: leave --train", USAGE)
    if optimizer is not None and not train:
        raise CommandError("--optimizer goes with --train", USAGE)
    engines = _engines(backends, peers, budgets, train)
    request = Request(
        spec=model,
        batch=batch,
        tiny=tiny,
        training=train,
        factory=factory,
        trust_pickle=trust_pickle,
        device=device,
    )
    load(request)  # what is wrong with the model or the device is said once, not by every row
    words = {**dataclasses.asdict(request), "device": None}
    job = Job(
        Source(function="memopt.cli.compare:loaded", arguments=words),
        "",
        train,
        str(torch.device(device)),
        dtype or "",
        optimizer or "",
        how.pop("warmup"),
        how.pop("repeats"),
    )
    case = Case(f"{model}:tiny" if tiny else model, job, tuple(engines), {"batch": batch})
    with progress(ctx, f"comparing {len(engines)} rows of {model}"), tempfile.TemporaryDirectory() as folder:
        (comparison,) = compare_cases([case], Path(folder), **how)
    emit(_rendered(comparison, chosen_format(form, output)), output)
    if all(row.reason for row in comparison.rows):
        raise CommandError("no engine ran the model: the table says why", FAILED)
    wrong = [row.name for row in comparison.rows if row.differs]
    if wrong:
        raise CommandError(f"the numbers of {', '.join(wrong)} differ by more than rounding explains", DIFFERENT)


def loaded(**request: Any) -> tuple[torch.nn.Module, Any]:
    """The model and its inputs, in the process of a row."""
    found = load(Request(**request))
    return found.model, found.inputs


def _engines(backends: str, peers: str, budgets: str | None, train: bool) -> list[Engine]:
    kinds = [name.strip() for name in backends.split(",") if name.strip()]
    if peers == "all":
        others = [name for name in PEERS if train or name in ("eager", "compile")]
    else:
        others = [name.strip() for name in peers.split(",") if name.strip() and name != "none"]
    limits = [] if budgets is None else [text.strip() for text in budgets.split(",") if text.strip()]
    if limits and not train:
        raise CommandError("--budget goes with --train", USAGE)
    for name in kinds:
        if name not in BACKENDS:
            raise CommandError(f"unknown backend {name!r}: use some of {', '.join(BACKENDS)}", USAGE)
    try:
        names = [*others, *kinds, *(f"{kind}:{limit}" for kind in kinds for limit in limits)]
        engines = [Engine.parse(name) for name in dict.fromkeys(names)]
    except ValueError as error:
        raise CommandError(str(error), USAGE) from error
    if not engines:
        raise CommandError("nothing to compare: name some --backends or --peers", USAGE)
    return engines


def _rendered(comparison: Comparison, form: str) -> str:
    if form == "json":
        return comparison.to_json()
    return comparison.to_html() if form == "html" else str(comparison)
