"""A model as a file that runs without it: ONNX, or a SavedModel of TensorFlow's."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memopt.api import call_arguments

if TYPE_CHECKING:
    from memopt.convert.record import Conversion
    from memopt.tensorflow.record import TensorFlowExport


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
