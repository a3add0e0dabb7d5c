"""SavedModels come in: as ONNX, proved beside TensorFlow's own results; compiled by XLA, measured before and after."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from memopt.budget import format_bytes
from memopt.convert.emit import rename
from memopt.convert.errors import ConversionError, DifferenceError
from memopt.convert.onnx_file import read_onnx
from memopt.convert.options import Options
from memopt.convert.pipeline import Clock, make_record
from memopt.convert.record import Conversion, count_nodes
from memopt.convert.rewriting import rewritten
from memopt.convert.verify import Expectation, OutputEvidence, compare_all, verify
from memopt.convert.write import staged
from memopt.tensorflow import exchange
from memopt.tensorflow.process import call, require
from memopt.tensorflow.record import Entry

# tf2onnx's operators are written for it and before.
LAST_OPSET = 18
_BATCH = 2
_CPU = {"CUDA_VISIBLE_DEVICES": ""}


def convert_saved_model(
    path: Path,
    output: Path | None,
    *,
    inputs: Mapping[str, Sequence[int]] | None = None,
    signature: str | None = None,
    options: Options | None = None,
) -> Conversion:
    """Convert a SavedModel to ONNX by tf2onnx, rewrite it, prove that it computes what TensorFlow does, and write it.

    Each run is compared with TensorFlow's own, beside the same graph in float64 where TensorFlow has the kernels.

    Args:
        path: the folder.
        output: the file; None converts and verifies only.
        inputs: shapes by input name, where the signature leaves other axes than the batch open.
        signature: which one; by default `serving_default`, or the only one.
        options: how; the operator set is 18 at most.

    Raises:
        TensorFlowError: a library is missing, TensorFlow cannot load or run the model, or tf2onnx not convert it.
        UnsafeModelError: the model holds operators that run code or touch files.
        InputsError: the signature or the inputs do not fit the model.
        ConversionError: what tf2onnx wrote is not valid, or a pass failed.
        DifferenceError: the file would compute other numbers than TensorFlow.
        ValueError: an operator set that tf2onnx has not.
    """
    require("tensorflow", "tf2onnx", "h5py", purpose="converting a SavedModel")
    options = options or Options()
    opset = options.opset or LAST_OPSET
    if opset > LAST_OPSET:
        raise ValueError(f"--opset {opset}: a SavedModel is converted to opset {LAST_OPSET} at most, by tf2onnx")
    clock = Clock(options.notify)
    with tempfile.TemporaryDirectory(prefix="memopt-tensorflow-") as name:
        folder = Path(name)
        with clock("export"):
            answer = _read(path, folder, "onnx", signature, inputs, batch=_BATCH, opset=opset)
            expected = _expectations(answer, folder)
            model = _named(read_onnx(folder / "model.onnx"), answer)
            before = count_nodes(model)
        with clock("passes"):
            feeds = [
                {str(value.name): item.inputs[str(value.name)].numpy() for value in model.graph.inputs}
                for item in expected[:2]
            ]
            model, records, notes = rewritten(model, options.pipeline, inputs=feeds, repeat=options.repeat)
        with staged(model, output or Path("model.onnx"), external_above=options.external_above) as stage:
            record = make_record(
                before, model, records, notes, path.name, output, answer["weights"], stage.file_bytes, options.target
            )
            with clock("verify"):
                runs = verify(expected, stage.runnable, [entry["name"] for entry in answer["outputs"]])
            if output is not None:
                with clock("write"):
                    stage.commit()
    if any(item.reference is None for item in expected):
        record = dataclasses.replace(record, notes=(*record.notes, "compared with TensorFlow's float32 only"))
    return dataclasses.replace(record, runs=runs, seconds=dict(clock.seconds))


def _read(
    path: Path,
    folder: Path,
    want: str,
    signature: str | None,
    inputs: Mapping[str, Sequence[int]] | None,
    **more: Any,
) -> dict[str, Any]:
    shapes = {name: list(sizes) for name, sizes in (inputs or {}).items()}
    request = {"path": str(path), "signature": signature, "inputs": shapes, "want": want, **more}
    return call("saved_model", request, folder, environment=_CPU)


def _expectations(answer: Mapping[str, Any], folder: Path) -> list[Expectation]:
    names = [entry["name"] for entry in answer["outputs"]]
    made = []
    for number, item in enumerate(answer["sets"]):
        outputs = exchange.read(folder, f"outputs_{number}")
        wide = exchange.read(folder, f"wide_{number}") if item["wide"] else None
        made.append(
            Expectation(
                {} if item["batch"] is None else {"batch": item["batch"]},
                exchange.read(folder, f"inputs_{number}"),
                [outputs[name] for name in names],
                None if wide is None else [wide[name] for name in names],
            )
        )
    return made


# -- what tf2onnx wrote -----------------------------------------------------------------------------------------------


def _named(model: ir.Model, answer: Mapping[str, Any]) -> ir.Model:
    """The graph with the signature's names and sizes, and with standard operators only.

    Raises:
        ConversionError: there is an operator that ONNX does not have.
    """
    graph = model.graph
    for node in list(graph.all_nodes()):
        if node.op_type == "Erfc" and not node.domain:
            _write_out_erfc(node)
    opset = graph.opset_imports[""]
    for node in graph.all_nodes():
        if not node.domain and not onnx.defs.has(node.op_type, opset):
            raise ConversionError(f"tf2onnx wrote {node.op_type} ({node.name}), which is no operator of ONNX")
    shapes = {entry["name"]: entry["shape"] for entry in (*answer["inputs"], *answer["outputs"])}
    for value in graph.inputs:
        name = answer["graph_inputs"].get(value.name)
        if name is None:
            raise ConversionError(f"tf2onnx made an input {value.name} that the signature has not")
        rename(graph, value, name)
        _resize(value, shapes[name])
    if len(graph.outputs) != len(answer["outputs"]):
        raise ConversionError(f"tf2onnx wrote {len(graph.outputs)} outputs, the signature has {len(answer['outputs'])}")
    for value, entry in zip(graph.outputs, answer["outputs"], strict=True):
        rename(graph, value, entry["name"])
        _resize(value, shapes[entry["name"]])
    model.producer_name = "memopt"
    return model


def _write_out_erfc(node: ir.Node) -> None:
    """Replace erfc(x), which ONNX does not have, by 1 - erf(x), in place."""
    graph = node.graph
    assert graph is not None
    erf = ir.node("Erf", [node.inputs[0]])
    one = ir.node("Constant", [], {"value": ir.tensor([1.0], dtype=ir.DataType.FLOAT)})
    cast = ir.node("CastLike", [one.outputs[0], erf.outputs[0]])
    rest = ir.node("Sub", [cast.outputs[0], erf.outputs[0]])
    old = node.outputs[0]
    rest.outputs[0].shape, rest.outputs[0].type = old.shape, old.type
    for new, word in ((erf, "erf"), (one, "one"), (cast, "cast"), (rest, "rest")):
        new.outputs[0].name = f"{old.name}_{word}"
        new.name = f"{node.name}_{word}"
    graph.insert_before(node, [erf, one, cast, rest])
    old.replace_all_uses_with(rest.outputs[0], replace_graph_outputs=True)
    graph.remove(node, safe=True)


def _resize(value: ir.Value, sizes: Sequence[int | None] | None) -> None:
    if sizes is None:
        return
    labels = ["batch" if axis == 0 else f"{value.name}_{axis}" for axis in range(len(sizes))]
    value.shape = ir.Shape([label if size is None else size for label, size in zip(labels, sizes, strict=True)])


# -- XLA --------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class XlaReport:
    """One signature of a SavedModel, or one function, before and after XLA.

    Attributes:
        source: what was compiled.
        signature: the name of the signature.
        inputs, outputs: of the signature.
        shapes: of the inputs that it was compiled and measured for.
        platform: what it was compiled for.
        weights: bytes of the variables.
        before: `seconds` of a run by TensorFlow's executor, and the `peak` of its allocations above the weights, in
            bytes (None where it keeps no record).
        after: `seconds` of a run of XLA's executable, `compile_seconds`, and bytes of its `arguments` (weights among
            them), `outputs`, `temporaries` and what is `aliased`, from the compiler's own analysis.
        evidence: how far XLA's results are from TensorFlow's.
    """

    source: str
    signature: str
    inputs: tuple[Entry, ...]
    outputs: tuple[Entry, ...]
    shapes: Mapping[str, tuple[int, ...]]
    platform: str
    weights: int
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    evidence: tuple[OutputEvidence, ...]

    def to_text(self) -> str:
        """A few lines for people, ending with a newline."""
        sizes = ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in self.shapes.items())
        peak, after = self.before["peak"], self.after
        rows = [
            ("", "memory above weights", "time of a run"),
            ("TensorFlow", "not known" if peak is None else format_bytes(peak), _milliseconds(self.before)),
            ("XLA", format_bytes(after["outputs"] + after["temporaries"] - after["aliased"]), _milliseconds(after)),
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        worst = max((item.max_relative for item in self.evidence), default=0.0)
        lines = [
            f"{self.source} ({self.signature}, {format_bytes(self.weights)} of weights) on {self.platform}",
            "inputs   " + ", ".join(map(str, self.inputs)),
            "outputs  " + ", ".join(map(str, self.outputs)),
            f"measured at {sizes}",
            "",
            *("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows),
            "",
            f"XLA: arguments {format_bytes(after['arguments'])}, outputs {format_bytes(after['outputs'])}, "
            f"temporaries {format_bytes(after['temporaries'])}; compiled in {after['compile_seconds']:.1f} s",
            f"equal to TensorFlow: largest difference {worst:.1e} of the largest value",
        ]
        return "\n".join(lines) + "\n"

    def to_json(self) -> str:
        """The whole report as JSON, ending with a newline."""
        return json.dumps({"format": "memopt xla report", "version": 1, **dataclasses.asdict(self)}, indent=2) + "\n"


def inspect_saved_model(
    path: Path,
    *,
    inputs: Mapping[str, Sequence[int]] | None = None,
    signature: str | None = None,
    batch: int = _BATCH,
) -> XlaReport:
    """Compile a signature of a SavedModel with XLA, through PJRT, and measure it beside TensorFlow's own executor.

    Args:
        path, inputs, signature: as `convert_saved_model` takes them.
        batch: how many examples in a run, where the signature leaves that open.

    Raises:
        TensorFlowError: a library is missing, or TensorFlow or XLA cannot do it; UnsafeModelError, InputsError.
        DifferenceError: XLA's results differ from TensorFlow's by more than rounding.
    """
    require("tensorflow", "jax", purpose="inspecting a SavedModel")
    with tempfile.TemporaryDirectory(prefix="memopt-tensorflow-") as name:
        folder = Path(name)
        answer = _read(path, folder, "xla", signature, inputs, batch=batch)
        first = _expectations(answer, folder)[0]
        found = exchange.read(folder, "xla")
    names = [entry["name"] for entry in answer["outputs"]]
    try:
        evidence = compare_all(names, [found[name] for name in names], first.outputs, first.reference)
    except DifferenceError as error:
        raise DifferenceError(f"compiled by XLA, {error}") from error
    return XlaReport(
        source=str(path),
        signature=answer["signature"],
        inputs=tuple(_entry(entry) for entry in answer["inputs"]),
        outputs=tuple(_entry(entry) for entry in answer["outputs"]),
        shapes={name: tuple(value.shape) for name, value in first.inputs.items()},
        platform=answer["platform"],
        weights=answer["weights"],
        before=answer["before"],
        after=answer["after"],
        evidence=evidence,
    )


def _entry(entry: Mapping[str, Any]) -> Entry:
    return Entry(entry["name"], entry["dtype"], tuple(entry["shape"] or ()))


def _milliseconds(row: Mapping[str, Any]) -> str:
    return f"{1e3 * row['seconds']:.2f} ms"
