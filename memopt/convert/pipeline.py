"""The whole way: a captured model to a verified ONNX file."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from memopt.convert.capture import Captured, capture
from memopt.convert.emit import DEFAULT_OPSET, emit, output_names
from memopt.convert.errors import ConversionError
from memopt.convert.inputs import Dynamic, dynamic_axes
from memopt.convert.record import Conversion, count_nodes, signature
from memopt.convert.verify import first_line, verify
from memopt.convert.write import SINGLE_FILE_BYTES, staged
from memopt.session import storage_bytes


def convert_module(
    model: torch.nn.Module,
    inputs: Mapping[str, Any],
    output: Path | None,
    *,
    source: str = "",
    dynamic: Dynamic | None = None,
    opset: int = DEFAULT_OPSET,
    external_above: int = SINGLE_FILE_BYTES,
) -> Conversion:
    """Convert `model(**inputs)` in its present mode to an ONNX file, verify it, and only then put it under its name.

    Args:
        model: the module; it is not changed.
        inputs: keyword arguments; axes that vary need a size of two or more.
        output: the file; None converts and verifies only.
        source: what the record calls the model.
        dynamic: which axes vary; by default batch and sequence where the inputs' names say which these are.
        opset: of the standard operators.
        external_above: with more bytes of weights they go to a file beside the model's.

    Raises:
        ConversionError: the model cannot be captured, exported or run.
        DifferenceError: the file would compute other numbers than the model; nothing is written.
        ValueError: `dynamic` names an axis that no input has.
        OSError: the folder cannot be written to.
    """
    wanted = dynamic or Dynamic()
    started = time.perf_counter()
    captured = capture(model, inputs, dynamic_axes(inputs, wanted), required=wanted.required)
    size = storage_bytes(list(model.state_dict().values()))
    return convert_captured(
        captured,
        output,
        source=source or type(model).__name__,
        bytes_before=size,
        opset=opset,
        external_above=external_above,
        seconds={"capture": time.perf_counter() - started},
    )


def convert_captured(
    captured: Captured,
    output: Path | None,
    *,
    source: str,
    bytes_before: int,
    opset: int = DEFAULT_OPSET,
    external_above: int = SINGLE_FILE_BYTES,
    seconds: Mapping[str, float] | None = None,
) -> Conversion:
    """Convert what was captured; see `convert_module`. `bytes_before` is the size of the source's weights."""
    clock = _Clock(seconds or {})
    with clock("export"):
        try:
            with torch.no_grad():
                result = captured.function(**captured.inputs)
        except Exception as error:
            raise ConversionError(f"the model cannot be run: {first_line(error)}") from error
        names = output_names(result)
        model = emit(captured, names, opset)
    before = count_nodes(model)
    target = output if output is not None else Path("model.onnx")
    with staged(model, target, external_above=external_above) as stage:
        with clock("verify"):
            runs = verify(captured, stage.runnable, names)
        if output is not None:
            with clock("write"):
                stage.commit()
        return _record(model, before, stage.file_bytes, captured.notes, runs, output, source, bytes_before, clock)


def _record(
    model: ir.Model,
    before: Mapping[str, int],
    size: int,
    notes: tuple[str, ...],
    runs: Any,
    output: Path | None,
    source: str,
    bytes_before: int,
    clock: _Clock,
) -> Conversion:
    return Conversion(
        source=source,
        output=None if output is None else str(output),
        opset=model.graph.opset_imports[""],
        inputs=tuple(signature(value) for value in model.graph.inputs),
        outputs=tuple(signature(value) for value in model.graph.outputs),
        nodes_before=before,
        nodes_after=count_nodes(model),
        bytes_before=bytes_before,
        bytes_after=size,
        runs=runs,
        notes=notes,
        seconds=dict(clock.seconds),
    )


class _Clock:
    """Wall time by step."""

    def __init__(self, seconds: Mapping[str, float]) -> None:
        self.seconds = dict(seconds)

    @contextmanager
    def __call__(self, step: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[step] = time.perf_counter() - started
