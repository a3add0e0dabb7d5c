"""The calls: compile, plan, estimate, export."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import nn

from memopt.backends.by_name import engine_of
from memopt.budget import format_bytes, parse_budget
from memopt.engine import Engine
from memopt.evidence import Verification
from memopt.memory.breakdown import MemoryBreakdown
from memopt.memory.cost.devices import find
from memopt.memory.optimizer import OptimizerLike
from memopt.memory.optimizers import listed
from memopt.module import CompiledModule, calls_of, compilable
from memopt.options import Options
from memopt.pass_manager import Pass
from memopt.report.record import Report
from memopt.together import compile_together

if TYPE_CHECKING:
    from memopt.convert.record import Conversion
    from memopt.tensorflow.record import TensorFlowExport

# Levers that change the numbers or the meaning of a step, by consent only.
LEVERS = ("freeze",)

Key = TypeVar("Key")


@overload
def compile(
    model: nn.Module,
    budget: str | int | float | None = None,
    *,
    example_inputs: Sequence[Any] | Mapping[str, Any] | torch.Tensor | None = None,
    optimizer: OptimizerLike | Sequence[OptimizerLike] | None = None,
    backend: str | Engine | None = None,
    passes: Iterable[Pass] | None = None,
    allow: Sequence[str] = (),
    verify: Verification = True,
    dynamic: bool | None = None,
) -> CompiledModule: ...


@overload
def compile(
    model: list[nn.Module],
    budget: str | int | float | None = None,
    *,
    example_inputs: Sequence[Any] | Mapping[str, Any] | torch.Tensor | None = None,
    optimizer: OptimizerLike | Sequence[OptimizerLike] | None = None,
    backend: str | Engine | None = None,
    passes: Iterable[Pass] | None = None,
    allow: Sequence[str] = (),
    verify: Verification = True,
    dynamic: bool | None = None,
) -> list[CompiledModule]: ...


@overload
def compile(
    model: tuple[nn.Module, ...],
    budget: str | int | float | None = None,
    *,
    example_inputs: Sequence[Any] | Mapping[str, Any] | torch.Tensor | None = None,
    optimizer: OptimizerLike | Sequence[OptimizerLike] | None = None,
    backend: str | Engine | None = None,
    passes: Iterable[Pass] | None = None,
    allow: Sequence[str] = (),
    verify: Verification = True,
    dynamic: bool | None = None,
) -> tuple[CompiledModule, ...]: ...


@overload
def compile(
    model: Mapping[Key, nn.Module],
    budget: str | int | float | None = None,
    *,
    example_inputs: Sequence[Any] | Mapping[str, Any] | torch.Tensor | None = None,
    optimizer: OptimizerLike | Sequence[OptimizerLike] | None = None,
    backend: str | Engine | None = None,
    passes: Iterable[Pass] | None = None,
    allow: Sequence[str] = (),
    verify: Verification = True,
    dynamic: bool | None = None,
) -> dict[Key, CompiledModule]: ...


def compile(
    model: nn.Module | Sequence[nn.Module] | Mapping[Any, nn.Module],
    budget: str | int | float | None = None,
    *,
    example_inputs: Sequence[Any] | Mapping[str, Any] | torch.Tensor | None = None,
    optimizer: OptimizerLike | Sequence[OptimizerLike] | None = None,
    backend: str | Engine | None = None,
    passes: Iterable[Pass] | None = None,
    allow: Sequence[str] = (),
    verify: Verification = True,
    dynamic: bool | None = None,
) -> Any:
    """Return the model's stand-in that trains and infers within a memory budget, with the same numbers.

    Args:
        model: any module that torch.compile runs. Several in a list, a tuple or a mapping (generator and discriminator,
            encoder and decoder, teacher and student) share the budget, and their stand-ins come in the same.
        budget: the most bytes that the device may hold during a step, everything counted, other tensors of the process
            too: "20GB" (20·10⁹), "20GiB" (20·2³⁰), a number of bytes; or a fraction in (0, 1] of the step's own
            unconstrained peak. None: memory is reduced only where it costs no time.
        example_inputs: positional arguments as a tuple or list, keyword arguments as a mapping, or one tensor: plan at
            once, without running the model. Without them the first call plans.
        optimizer: what will step the parameters: an optimizer (one that wraps others, too), a list of several, or a
            class or function that makes one of a list of parameters. State and temporaries count; it is never stepped
            here. State that a step on fake tensors does not tell (LBFGS) counts after the first step, as that of an
            optimizer which was not given does under a budget; `set_optimizer` of the stand-in gives one later.
        backend: "inductor" for speed, "aten" for a step that is byte for byte what was planned, "static" for inference
            in one arena with no allocation in a call but the results, "onnxruntime" for inference by ONNX Runtime,
            "xla" for executables of XLA's, "tensorflow" for inference by TensorFlow, compiled by XLA; or an engine of
            `memopt.backends` with options of its own. None: "inductor" for training, and for inference "inductor" or
            "static", by measured time under the budget. Where Inductor lays convolutions out channels-last, because it
            is faster, the model's own parameters are laid out so: the same values and objects, with other strides. On
            CUDA weights that multiply the same value are moved into one block, where one product of them is faster.
        passes: rewrites in order, in place of `memopt.INFERENCE` or `memopt.TRAINING`.
        allow: names of levers that may change the numbers. "freeze": for inference, batch norms are folded into the
            model's own parameters and buffers, in place and for good: it computes the same function from other
            numbers, and is to be trained no further.
        verify: True proves each rewrite on its own region, measures a trial step, and compares once what each captured
            graph returns (shapes, strides, dtypes, gradients required, memory shared) with what the model returns on
            fake tensors. "full" also compares whole programs, and at the first call of each graph runs the model
            itself beside the compiled call: outputs, all gradients by random tangents, buffers, attributes, arguments
            and random numbers afterwards. That takes several times the memory of a step, beyond any budget, and its
            time. False trusts (but code for a GPU, which must keep a budget, is measured all the same).
        dynamic: whether inputs have many sizes. None: the first sizes are planned by themselves; when others come,
            calls are captured with symbols for the sizes that vary, and one compilation serves all within the
            budget. True: training steps so from the first on, with all sizes. False: each size is planned by itself.

    Returns:
        A module with the model's own parameters and state dict keys; `.report` tells what was done.

    Raises:
        BudgetError: no plan keeps the budget (here with `example_inputs`, else at the first call).
        ValueError: the budget, the backend or a lever is not understood.
        TypeError: `model` is no module, `optimizer` none of these, or `passes` holds something that is not a Pass.
    """
    if not isinstance(model, nn.Module) and isinstance(model, (list, tuple, Mapping)):
        if example_inputs is not None:
            raise ValueError("example_inputs are one model's: several are planned in the first step that calls them")
        shared: dict[str, Any] = {"backend": backend, "passes": passes, "allow": allow, "verify": verify}
        shared |= {"budget": budget, "dynamic": dynamic}
        return compile_together(
            model, optimizer, lambda each, own: make_options(optimizer=own, device=device_of(each), **shared)
        )
    model, notes = compilable(model)
    options = make_options(
        budget=budget,
        optimizer=optimizer,
        backend=backend,
        passes=passes,
        allow=allow,
        verify=verify,
        dynamic=dynamic,
        device=device_of(model),
    )
    compiled = CompiledModule(model, dataclasses.replace(options, notes=(*options.notes, *notes)))
    if example_inputs is not None:
        calls_of(compiled).plan_ahead(*call_arguments(example_inputs))
    return compiled


def make_options(
    *,
    budget: str | int | float | None = None,
    optimizer: OptimizerLike | Sequence[OptimizerLike] | None = None,
    backend: str | Engine | None = None,
    passes: Iterable[Pass] | None = None,
    allow: Sequence[str] = (),
    verify: Verification = True,
    dynamic: bool | None = None,
    device: torch.device,
) -> Options:
    """Check what a user asked for and make it definite.

    Raises:
        ValueError: the budget, the backend or a lever is not understood.
        TypeError: `passes` holds something that is not a Pass, or `optimizer` is none.
    """
    if isinstance(allow, str):
        raise ValueError(f"allow takes names in a tuple: allow=({allow!r},)")
    for lever in allow:
        if lever not in LEVERS:
            raise ValueError(f"allow: unknown lever {lever!r} (known: {', '.join(LEVERS)})")
    if verify not in (True, False, "full"):
        raise ValueError(f'verify is {verify!r}: use True, False or "full"')
    listed(optimizer)  # refuses what is none
    if isinstance(passes, Pass):
        raise TypeError(f"passes takes a tuple: passes=({passes!r},)")
    chosen = None if passes is None else tuple(passes)
    for item in chosen or ():
        if not isinstance(item, Pass):
            raise TypeError(f"passes must hold memopt.Pass instances, not {item!r}")
    parsed = None if budget is None else parse_budget(budget)
    engine, notes = engine_of(backend, device, parsed)
    return Options(
        budget=parsed,
        optimizer=optimizer,
        engine=engine,
        passes=chosen,
        verify=verify,
        notes=notes,
        allow=tuple(allow),
        dynamic=dynamic,
    )


def plan(
    model: nn.Module,
    inputs: Sequence[Any] | Mapping[str, Any] | torch.Tensor,
    budget: str | int | float | None = None,
    *,
    optimizer: OptimizerLike | Sequence[OptimizerLike] | None = None,
    backend: str = "aten",
    verify: Verification = False,
    device: str | None = None,
) -> Report:
    """Plan a step without running the model and return the report.

    A model in training mode is planned for forward and backward, one in eval mode for inference.

    Args:
        model, inputs, budget, optimizer, backend, verify: as `compile` takes them; `inputs` as its `example_inputs`.
        device: the name of a device to plan for that this machine may not have ("h100", "a100", "rtx4090", …): times
            are estimated from its data sheet, and sizes are those of its allocator. The model may lie anywhere. None:
            plan for the device that the model lies on.

    Raises:
        ValueError: the device is not known (the message lists those that are), or `verify` or a backend other than
            "aten" is asked for with it.
        BudgetError: no plan keeps the budget.
        CaptureError: the model's control flow depends on the values of tensors.
    """
    compiled = compile(model, budget, optimizer=optimizer, backend=backend, verify=verify)
    if device is not None:
        if verify:
            raise ValueError("a plan for a device that is not here cannot be verified by running it: leave verify off")
        if backend != "aten":
            raise ValueError(f'a plan for a device that is not here is one of backend "aten", not {backend!r}')
        compiled = CompiledModule(model, dataclasses.replace(calls_of(compiled).options, target=find(device)))
    with torch.set_grad_enabled(model.training):
        report = calls_of(compiled).plan(*call_arguments(inputs))
    target = calls_of(compiled).options.target
    if target is None or report.peak_bytes <= target.memory_bytes:
        return report
    note = f"{format_bytes(report.peak_bytes)} are more than the {format_bytes(target.memory_bytes)} of {target.title}"
    return dataclasses.replace(report, notes=(*report.notes, note))


def estimate(
    model: nn.Module,
    inputs: Sequence[Any] | Mapping[str, Any] | torch.Tensor,
    optimizer: OptimizerLike | Sequence[OptimizerLike] | None = None,
) -> MemoryBreakdown:
    """Predict where the bytes of one step go, without running the model.

    A model in training mode is counted with backward (and the optimizer, where one is given), one in eval mode without.
    The step is the one that `memopt.compile(model, backend="aten")` runs without a budget.

    Raises:
        CaptureError: the model's control flow depends on the values of tensors.
    """
    return plan(model, inputs, None, optimizer=optimizer).breakdown


def export(
    model: nn.Module | str | os.PathLike[str],
    example_inputs: Sequence[Any] | Mapping[str, Any] | torch.Tensor | None,
    path: str | os.PathLike[str] | None,
    *,
    dynamic: str | None = None,
    opset: int | None = None,
    target: str = "standard",
    dtype: str | None = None,
    quantize: str | None = None,
    tolerance: float | None = None,
    level: int = 2,
    passes: Sequence[str] | None = None,
    skip: Sequence[str] = (),
    allow_larger: bool = False,
    measure: bool = True,
    overwrite: bool = False,
) -> Conversion:
    """Convert a model to an optimized ONNX file, prove that it computes the same, and return the record.

    The same as `memopt convert`: the file is written whole or not at all, and only when real runs at several shapes
    agree with the model beside float64.

    Args:
        model: a module, converted in its present mode; or the path of an ONNX file, which is rewritten.
        example_inputs: positional arguments as a tuple or list, keyword arguments as a mapping, or one tensor; axes
            that vary need a size of two or more. For an ONNX file arrays by input name, or None: they are made up.
        path: the file to write; None converts and verifies only.
        dynamic: which axes vary: "batch,sequence", "x:0=rows", or "none"; by default batch and sequence where the names
            of the inputs say which these are. An ONNX file has axes of its own.
        opset: of the standard operators; None: 20 for a module (22 with bf16), its own for an ONNX file.
        target: "standard" operators only, or with those of "onnxruntime" (com.microsoft) where these do more,
            or of "onnxruntime-cuda", where they do more on CUDA.
        dtype: "fp16" or "bf16": lower precision, with sensitive operators kept in float32; "fp32": a module of lower
            precision widened first. None: the module's own.
        quantize: "int8": weights of matrix products in it, activations quantized as they come.
        tolerance: with `dtype` or `quantize`, the share of an output's largest value that may differ; None: what
            `memopt.convert.lower` says.
        level: 0: no pass; 1: those that fuse nothing; 2: all; 3: all, again until nothing changes.
        passes: names of passes on the ONNX graph, in order, in place of the level's.
        skip: names of passes to leave out.
        allow_larger: whether an ONNX file may come out larger than it went in.
        measure: whether the graph before and after is run for its memory and time.
        overwrite: whether a file that exists is replaced.

    Returns:
        What was converted and how it was proved: `.to_text()`, `.to_json()`, nodes, bytes, passes, refusals, runs.

    Raises:
        memopt.convert.errors.DifferenceError: the file would compute other numbers; the guilty pass is named.
        memopt.convert.errors.ConversionError: the model cannot be captured, exported or run, or the file not be read.
        FileExistsError: `path` exists, and `overwrite` is not set.
        ValueError: an option or an axis is not known, or the inputs are others than the ONNX file's.
        TypeError: forward does not take the inputs, or gives them no names.
        ImportError: the `onnx` extra is not installed.
    """
    try:
        from memopt.convert.from_onnx import convert_onnx
        from memopt.convert.inputs import Dynamic, named, parse_dynamic
        from memopt.convert.options import make_options
        from memopt.convert.pipeline import convert_module
    except ImportError as error:
        raise ImportError(f"memopt.export needs {error.name or error}: pip install memopt[onnx]") from error
    output = None if path is None else Path(path)
    if output is not None and output.exists() and not overwrite:
        raise FileExistsError(f"{output} exists: choose another name or set overwrite")
    how = make_options(
        opset=opset,
        target=target,
        dtype=dtype,
        quantize=quantize,
        tolerance=tolerance,
        level=level,
        passes=passes,
        skip=skip,
        allow_larger=allow_larger,
        measure=measure,
    )
    axes = Dynamic() if dynamic is None else parse_dynamic(dynamic)
    if not isinstance(model, nn.Module):
        if dynamic is not None:
            raise ValueError(f"{os.fspath(model)} has shapes of its own: leave dynamic")
        if example_inputs is not None and not isinstance(example_inputs, Mapping):
            raise TypeError("the inputs of an ONNX file go by their names: give a mapping")
        return convert_onnx(Path(model), output, inputs=example_inputs, options=how)
    if example_inputs is None:
        raise TypeError("a module needs example inputs")
    args, kwargs = call_arguments(example_inputs)
    return convert_module(model, kwargs or named(model, args), output, dynamic=axes, options=how)


def export_tensorflow(
    model: nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any] | torch.Tensor,
    path: str | os.PathLike[str] | None,
    *,
    dynamic: bool = True,
    overwrite: bool = False,
) -> TensorFlowExport:
    """Write a model as a SavedModel that XLA compiles, prove that it computes the same, and return the record.

    The folder is loaded by `tf.saved_model.load` where neither torch nor memopt is. Its one signature,
    `serving_default`, has the names of the model's inputs and outputs. It is written whole or not at all, and only when
    real runs by TensorFlow alone, at several batch sizes, agree with the model beside float64.

    Args:
        model: a module, in its present mode; it must neither draw random numbers nor change its buffers.
        example_inputs: positional arguments as a tuple or list, keyword arguments as a mapping, or one tensor.
        path: the folder to write; None verifies only.
        dynamic: whether the batch varies: the first axis of the inputs that have the first input's size there. Where it
            cannot, a note says why, and shapes are fixed.
        overwrite: whether a SavedModel that exists is replaced.

    Returns:
        What was written and how it was proved: `.to_text()`, `.to_json()`, signature, bytes, memory, runs.

    Raises:
        memopt.convert.errors.DifferenceError: the SavedModel would compute other numbers.
        memopt.convert.errors.ConversionError: the model cannot be captured, lowered or run.
        memopt.tensorflow.process.TensorFlowError: TensorFlow is missing, or fails.
        FileExistsError: `path` exists, and `overwrite` is not set or it is no SavedModel.
        ValueError: the inputs are other things than tensors.
        TypeError: forward does not take the inputs, or gives them no names.
        ImportError: the `tensorflow` extra is not installed.
    """
    try:
        from memopt.convert.inputs import named
        from memopt.tensorflow.export import export_source
        from memopt.tensorflow.source import Source
    except ImportError as error:
        needed = error.name or error
        raise ImportError(f"memopt.export_tensorflow needs {needed}: pip install memopt[tensorflow]") from error
    args, kwargs = call_arguments(example_inputs)
    source = Source.of_module(model, kwargs or named(model, args))
    output = None if path is None else Path(path)
    return export_source(source, output, name=type(model).__name__, dynamic=dynamic, overwrite=overwrite)


def call_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments from example inputs: a mapping is keywords, a tuple or list is positions."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    return (inputs,), {}


def device_of(model: nn.Module) -> torch.device:
    """Where the model's first tensor is; the CPU where it has none."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")
