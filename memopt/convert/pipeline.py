"""The whole way: a captured model to a verified ONNX file."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from memopt.convert.arrays import to_array
from memopt.convert.bisect_failure import culprit, second_opinion
from memopt.convert.capture import Captured, capture
from memopt.convert.emit import DEFAULT_OPSET, emit, output_names
from memopt.convert.errors import ConversionError, DifferenceError
from memopt.convert.inputs import Dynamic, dynamic_axes
from memopt.convert.key_values import without_cache
from memopt.convert.lower import lowered
from memopt.convert.measure import as_file, costs
from memopt.convert.options import Options
from memopt.convert.pretranspose_weights import pretranspose_weights
from memopt.convert.record import Conversion, count_nodes, signature
from memopt.convert.rewriting import PROVED_BYTES, check_form, rewritten
from memopt.convert.verify import HIDDEN_NOTE, expect, made_inputs, reason_of, trials, verify
from memopt.convert.widen import widened
from memopt.convert.write import staged
from memopt.onnx.infer import skeleton
from memopt.onnx.manager import OnnxPassRecord
from memopt.onnx.read import weight_bytes

# How many sets of inputs the model is run on before and after each pass.
_INPUT_SETS = 2
# Most operators take bfloat16 from this operator set on only.
_BRAIN_OPSET = 22


def convert_module(
    model: torch.nn.Module,
    inputs: Mapping[str, Any],
    output: Path | None,
    *,
    source: str = "",
    dynamic: Dynamic | None = None,
    options: Options | None = None,
) -> Conversion:
    """Convert `model(**inputs)` in its present mode to an ONNX file, verify it, and only then put it under its name.

    Args:
        model: the module; it is not changed, but see `Options.consume`.
        inputs: keyword arguments; axes that vary need a size of two or more.
        output: the file; None converts and verifies only.
        source: what the record calls the model.
        dynamic: which axes vary; by default batch and sequence where the inputs' names say which these are.
        options: how; by default with all passes.

    Raises:
        ConversionError: the model cannot be captured, exported or run.
        DifferenceError: the file would compute other numbers than the model; nothing is written.
        ValueError: `dynamic` names an axis that no input has.
        OSError: the folder cannot be written to.
    """
    wanted, options = dynamic or Dynamic(), options or Options()
    clock = Clock(options.notify)
    if options.dtype is not None or options.quantize is not None:
        model, inputs = widened(model, inputs, consume=options.consume)
    with without_cache(model):
        with clock("capture"):
            captured = capture(model, inputs, dynamic_axes(inputs, wanted), required=wanted.required)
        name = source or type(model).__name__
        return convert_captured(captured, output, source=name, options=options, clock=clock)


def convert_captured(
    captured: Captured,
    output: Path | None,
    *,
    source: str,
    options: Options | None = None,
    clock: Clock | None = None,
) -> Conversion:
    """Convert what was captured; see `convert_module`."""
    options = options or Options()
    clock = clock or Clock(options.notify)
    with clock("export"):
        try:
            with torch.no_grad():
                result = captured.function(**captured.inputs)
        except Exception as error:
            raise ConversionError(f"the model cannot be run: {reason_of(error)}") from error
        names = output_names(result)
        exported = emit(captured, names, _opset(captured, options))
        before, plain = count_nodes(exported), as_file(exported) if options.measure else None
        size = skeleton(exported).ByteSize() + weight_bytes(exported)
        pretranspose_weights(exported)
    with clock("passes"):
        feeds = [as_arrays(made_inputs(captured, sizes, seed), exported) for seed, sizes in enumerate(_sets(captured))]
        model, records, notes = rewritten(
            exported, options.pipeline, inputs=feeds, repeat=options.repeat, notify=options.notify
        )
    with clock("precision"):
        low = lowered(model, options)
        model, steps, notes = low.model, low.after(records), (*notes, *low.notes)
    with clock("reference"):
        expected = expect(captured)
    with staged(model, output or Path("model.onnx"), external_above=options.external_above) as stage:
        check_form(model)
        record = make_record(
            before,
            model,
            steps,
            (*captured.notes, *notes),
            source,
            output,
            size,
            stage.file_bytes,
            options.target,
        )
        if options.measure:
            with clock("measure"):
                file = stage.runnable if low.runs and isinstance(stage.runnable, bytes) else None
                old, new = costs(exported, model, (plain, file), feeds[0])
                record = dataclasses.replace(record, cost_before=old, cost_after=new)
        consumed = options.consume and low.stand_in is None and weight_bytes(model) > PROVED_BYTES
        if consumed:
            del exported, model
            captured.release()
        with clock("verify"):
            try:
                first, *others = low.runnables(stage.runnable)
                runs = verify(expected, first, names, low.allowed)
                for other in others:
                    verify(expected, other, names, low.allowed)
            except DifferenceError as error:
                if consumed:
                    raise
                who = culprit(
                    exported,
                    options.pipeline,
                    records,
                    low.step,
                    lambda graph: verify(expected, as_runnable(graph), names),
                    "the graph as torch.onnx exports it",
                )
                heard = second_opinion(low.stand_in or model, expected, names, low.allowed)
                raise DifferenceError(f"{error}; {who}; {heard}") from error
        if output is not None:
            with clock("write"):
                stage.commit()
    if any(run.visible_only for run in runs):
        record = dataclasses.replace(record, notes=(*record.notes, HIDDEN_NOTE))
    return dataclasses.replace(record, runs=runs, seconds=dict(clock.seconds), allowed=low.allowed)


def _opset(captured: Captured, options: Options) -> int:
    weights = captured.exported.state_dict.values()
    brain = options.dtype == "bf16" or any(value.dtype is torch.bfloat16 for value in weights)
    return options.opset or (_BRAIN_OPSET if brain else DEFAULT_OPSET)


def as_runnable(graph: ir.Model) -> bytes:
    """The graph as a file, for ONNX Runtime to run as a user would."""
    payload: bytes = ir.to_proto(graph).SerializeToString()
    return payload


def _sets(captured: Captured) -> list[dict[str, int]]:
    sizes = trials(captured.axes)
    return (sizes * _INPUT_SETS)[:_INPUT_SETS]


def as_arrays(inputs: Mapping[str, Any], model: ir.Model) -> dict[str, Any]:
    """The inputs of the ONNX graph as arrays by name."""
    return {str(value.name): to_array(inputs[str(value.name)]) for value in model.graph.inputs}


def make_record(
    before: Mapping[str, int],
    after: ir.Model,
    passes: Sequence[OnnxPassRecord],
    notes: Sequence[str],
    source: str,
    output: Path | None,
    bytes_before: int,
    bytes_after: int,
    target: str = "standard",
) -> Conversion:
    """The record of a conversion, without runs and times; `before` counts the nodes by operator."""
    return Conversion(
        source=source,
        output=None if output is None else str(output),
        opset=after.graph.opset_imports.get("", 0),
        target=target,
        inputs=tuple(signature(value) for value in after.graph.inputs),
        outputs=tuple(signature(value) for value in after.graph.outputs),
        nodes_before=before,
        nodes_after=count_nodes(after),
        bytes_before=bytes_before,
        bytes_after=bytes_after,
        passes=tuple(passes),
        runs=(),
        notes=tuple(notes),
        seconds={},
    )


class Clock:
    """Wall time by step; `notify` is told of each step as it begins."""

    def __init__(self, notify: Callable[[str], None] | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._notify = notify

    @contextmanager
    def __call__(self, step: str) -> Iterator[None]:
        """Add the time that the block takes."""
        if self._notify is not None:
            self._notify(step)
        started = time.perf_counter()
        yield
        self.seconds[step] = self.seconds.get(step, 0.0) + time.perf_counter() - started
