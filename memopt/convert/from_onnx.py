"""An ONNX file rewritten: read with care, rewritten with proof, and never larger than it was."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx
import onnx.version_converter
import onnx_ir as ir

from memopt.budget import format_bytes
from memopt.convert.arrays import to_tensor
from memopt.convert.bisect_failure import culprit
from memopt.convert.errors import ConversionError, DifferenceError
from memopt.convert.lower import Lowered, lowered
from memopt.convert.measure import as_file, costs
from memopt.convert.onnx_file import external_files, read_onnx, size_of
from memopt.convert.options import Options
from memopt.convert.pipeline import Clock, make_record
from memopt.convert.record import Conversion, count_nodes
from memopt.convert.rewriting import check_form, rewritten
from memopt.convert.verify import OutputEvidence, Run, Runner, compare_all
from memopt.convert.write import SINGLE_FILE_BYTES, Staged, staged, write_whole
from memopt.errors import first_line
from memopt.onnx import OnnxEvidence, OnnxEvidenceError, OnnxModelError, prepare
from memopt.onnx.evidence import Witness
from memopt.onnx.read import dims, graphs, opset, weight_bytes
from memopt.onnx.samples import Sample, UnknownInput, samples

# How much further than the given model's own error against float64 the written one's may be.
_RATIO = 10.0
_RUNS = 3
# No single value of a model may take more than this share of the memory that is there.
_SHARE = 0.5


def convert_onnx(
    path: Path,
    output: Path | None,
    *,
    inputs: Mapping[str, Any] | None = None,
    options: Options | None = None,
) -> Conversion:
    """Rewrite an ONNX file, prove that the result computes the same, and only then put it under its name.

    A result that would be larger is not written: the output is then the input, as it was.

    Args:
        path: the model; its weights may lie beside it.
        output: the file; None rewrites and verifies only.
        inputs: arrays by input name to compare on; made up in several shapes by default.
        options: how; the operator set stays the model's own where none is asked for.

    Raises:
        ConversionError: the file is broken or hostile, a pass failed, or what was rewritten cannot be compared.
        DifferenceError: the numbers differ; nothing is written.
        ValueError: the inputs are others than the model's.
        OSError: a file cannot be read, or the folder not be written to.
    """
    options = options or Options()
    clock = Clock(options.notify)
    with clock("read"):
        given = read_onnx(path)
        try:
            before = prepare(given)
        except OnnxModelError as error:
            raise ConversionError(f"{path}: {error}") from error
        _refuse_monsters(before, path)
    if inputs is not None:
        _check_names(before, path, inputs)
    counted = count_nodes(before)
    wanted = before
    if options.opset is not None and options.opset != opset(before):
        with clock("opset"):
            wanted = at_opset(before, options.opset)
    with clock("passes"):
        sets = None if inputs is None else [inputs]
        model, records, notes = rewritten(
            wanted, options.pipeline, inputs=sets, repeat=options.repeat, notify=options.notify
        )
    with clock("precision"):
        low = lowered(model, options)
        model, steps = low.model, low.after(records)
    size = size_of(path)
    asked = low.step is not None or wanted is not before
    changed = asked or any(record.changes for record in steps)
    target = output or path
    if changed:
        _as_annotated(model, given)
        with staged(model, target, external_above=options.external_above) as stage:
            if stage.file_bytes <= size or options.allow_larger or asked:
                check_form(model)
                with clock("verify"):
                    try:
                        runs = _verified(before, stage, inputs, low)
                    except DifferenceError as error:
                        who = culprit(
                            wanted,
                            options.pipeline,
                            records,
                            low.step,
                            lambda graph: _same(before, graph, inputs),
                            "the operator set's change",
                        )
                        raise DifferenceError(f"{error}; {who}") from error
                record = make_record(
                    counted,
                    model,
                    steps,
                    (*notes, *low.notes),
                    path.name,
                    output,
                    size,
                    stage.file_bytes,
                    options.target,
                )
                if options.measure:
                    with clock("measure"):
                        record = _with_costs(record, before, model, stage, low, inputs)
                if output is not None:
                    with clock("write"):
                        stage.commit()
                return dataclasses.replace(record, runs=runs, seconds=dict(clock.seconds), allowed=low.allowed)
            reason = f"rewritten it would take {format_bytes(stage.file_bytes)}, more than before: it stays as it was"
    else:
        reason = "nothing was rewritten"
    with _unchanged(given, path, target, options) as stage:
        record = make_record(counted, given, steps, (*notes, reason), path.name, output, size, stage.file_bytes)
        if output is not None:
            stage.commit()
    return dataclasses.replace(record, seconds=dict(clock.seconds))


@contextlib.contextmanager
def _unchanged(given: ir.Model, path: Path, target: Path, options: Options) -> Iterator[Staged]:
    """The model as it was: the very bytes where they are all in one file."""
    if external_files(path):
        with staged(given, target, external_above=min(options.external_above, 0)) as stage:
            yield stage
        return
    payload = path.read_bytes()
    yield Staged(payload, len(payload), lambda: write_whole(target, payload))


def _as_annotated(model: ir.Model, given: ir.Model) -> None:
    """Keep types and shapes of inner values only where the given model had them."""
    known = {
        value.name
        for graph in graphs(given)
        for node in graph
        for value in node.outputs
        if value.type is not None or value.shape is not None
    }
    for graph in graphs(model):
        for node in graph:
            for value in node.outputs:
                if value.name not in known and not value.is_graph_output():
                    value.type = value.shape = None


def _verified(before: ir.Model, stage: Staged, inputs: Mapping[str, Any] | None, low: Lowered) -> tuple[Run, ...]:
    """Run the given model and the staged file on the same inputs; see `memopt.onnx.evidence` for the comparison."""
    try:
        candidates = samples(before, _RUNS) if inputs is None else [Sample(dict(inputs), {})]
    except UnknownInput as error:
        raise ConversionError(f"what was rewritten cannot be compared: {error}") from error
    witness = Witness(before, candidates, min(_RUNS, len(candidates)))
    if not witness.samples:
        why = "; ".join(witness.notes) or "it runs on no inputs that were tried"
        raise ConversionError(f"what was rewritten cannot be compared: {why}; --passes '' leaves it as it is")
    if low.step is not None:
        first, *others = [Runner(item) for item in low.runnables(stage.runnable)]
        for other in others:
            _near(before, witness, other, low.allowed)
        return _near(before, witness, first, low.allowed)
    if isinstance(stage.runnable, bytes):
        written = ir.from_proto(onnx.load_model_from_string(stage.runnable))
    else:
        written = read_onnx(stage.runnable)
    try:
        evidence = witness.compare(written, _RATIO)
    except OnnxEvidenceError as error:
        raise DifferenceError(f"the written file computes other numbers: {error}") from error
    assert evidence is not None
    return tuple(Run(sample.axes, _outputs(evidence)) for sample in witness.samples)


def _same(before: ir.Model, graph: ir.Model, inputs: Mapping[str, Any] | None) -> None:
    payload = ir.to_proto(graph).SerializeToString()
    _verified(before, Staged(payload, len(payload), lambda: None), inputs, Lowered(graph))


def _near(before: ir.Model, witness: Witness, runner: Runner, allowed: float) -> tuple[Run, ...]:
    """Compare at lower precision: beside float64 where it is known, and up to the share that is allowed."""
    names = [str(value.name) for value in before.graph.outputs]
    found = []
    for sample, given, truth in zip(witness.samples, witness.before, witness.truths(), strict=True):
        try:
            inputs = {name: to_tensor(value) for name, value in sample.feeds.items()}
            expected = [to_tensor(value) for value in given]
            wide = None if truth is None else [to_tensor(value) for value in truth]
        except (TypeError, RuntimeError, ValueError) as error:
            raise ConversionError(f"what was rewritten cannot be compared: {error}") from error
        where = f" at {sample}" if sample.axes else ""
        outputs = compare_all(names, runner(inputs), expected, wide, where, allowed)
        found.append(Run(dict(sample.axes), outputs))
    return tuple(found)


def _with_costs(
    record: Conversion, before: ir.Model, after: ir.Model, stage: Staged, low: Lowered, inputs: Mapping[str, Any] | None
) -> Conversion:
    """The record with what a run takes, on the inputs given or on the first ones made up."""
    sample = samples(before, 1)[0] if inputs is None else Sample(dict(inputs), {})
    after_file = stage.runnable if low.runs and isinstance(stage.runnable, bytes) else None
    files = (None if after_file is None else as_file(before), after_file)
    old, new = costs(before, after, files, sample.feeds)
    return dataclasses.replace(record, cost_before=old, cost_after=new)


def _outputs(evidence: OnnxEvidence) -> tuple[OutputEvidence, ...]:
    """The worst over outputs and samples: that is what the comparison keeps."""
    found = OutputEvidence(
        "all", evidence.max_abs_error, evidence.max_rel_error, evidence.max_ulp, evidence.max_abs_error, None
    )
    return (found,)


def _check_names(model: ir.Model, path: Path, inputs: Mapping[str, Any]) -> None:
    """Refuse inputs of other names than the model's, and fewer than it needs: weights among its own have defaults."""
    names = [str(value.name) for value in model.graph.inputs]
    needed = [str(value.name) for value in model.graph.inputs if not value.is_initializer()]
    for name in inputs:
        if name not in names:
            raise ValueError(f"{path} has no input {name}: its inputs are {', '.join(needed) or 'none'}")
    missing = [name for name in needed if name not in inputs]
    if missing:
        raise ValueError(f"{path} needs a value of each input: {', '.join(missing)} is missing")


def _refuse_monsters(model: ir.Model, path: Path) -> None:
    """Refuse models that say of a value that it takes more than the machine has: running them would end the process."""
    limit = int(_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for graph in graphs(model):
        for value in (*graph.inputs, *(value for node in graph for value in node.outputs)):
            size = 8 if value.dtype in (None, ir.DataType.STRING) else max(int(value.dtype.bitwidth // 8), 1)
            for item in dims(value) or ():
                size *= max(item, 1) if item is not None else 1
            if size > limit:
                has = f"{value.name} would take {format_bytes(size)}"
                raise ConversionError(f"{path}: {has}, more than half of this machine's memory")


def at_opset(model: ir.Model, version: int) -> ir.Model:
    """Return the model with operators of the version, ready for passes.

    Raises:
        ConversionError: an operator has no form there that the converter knows, or the weights are too large for it.
    """
    if weight_bytes(model) > SINGLE_FILE_BYTES:
        raise ConversionError(f"weights above {SINGLE_FILE_BYTES} bytes cannot be put at another operator set")
    try:
        return prepare(onnx.version_converter.convert_version(ir.to_proto(model), version))
    except OnnxModelError as error:
        raise ConversionError(f"at operator set {version} {error}") from error
    except Exception as error:  # the converter raises whatever comes up
        raise ConversionError(f"the model cannot be put at operator set {version}: {first_line(error)}") from error
