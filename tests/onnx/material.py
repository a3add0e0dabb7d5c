"""The ONNX package's own material: node test cases and light models, through passes, against the shipped outputs."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.backend.test
import onnx_ir as ir

from memopt.onnx.engines import Engine, EngineError, OnnxRuntime, Reference
from memopt.onnx.graph_pass import OnnxPass
from memopt.onnx.load import OnnxModelError, prepare
from memopt.onnx.manager import OnnxPassManager, node_count
from memopt.onnx.read import graphs, is_random, opset

LIGHT = pathlib.Path(onnx.backend.test.__file__).parent / "data" / "light"


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    model: onnx.ModelProto | ir.Model
    data: Sequence[tuple[Sequence[Any], Sequence[Any]]]
    rtol: float
    atol: float


@dataclasses.dataclass(frozen=True)
class Outcome:
    """`status` is "equal", "refused" or "different"; `reason` says why it is not equal."""

    name: str
    status: str
    engine: str = ""
    reason: str = ""
    changes: int = 0
    nodes: tuple[int, int] = (0, 0)


def node_cases() -> list[Case]:
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy's, while the package computes its expected outputs
        found = collect_testcases(None)
    return [Case(case.name, case.model, case.data_sets or [], case.rtol, case.atol) for case in found]


def light_models() -> Iterator[Case]:
    """The nine models on the inputs that the package's own runner feeds them."""
    for path in sorted(LIGHT.glob("*.onnx")):
        model = onnx.load(path)
        output = onnx.TensorProto.FromString(path.with_name(path.stem + "_output_0.pb").read_bytes())
        weights = {tensor.name for tensor in model.graph.initializer}
        (given,) = [value for value in model.graph.input if value.name not in weights]
        shape = [dim.dim_value for dim in given.type.tensor_type.shape.dim]
        size = int(np.prod(shape))
        feed = (np.arange(size).reshape(shape) / size).astype(np.float32)
        yield Case(path.stem, model, [([feed], [onnx.numpy_helper.to_array(output)])], 1e-3, 1e-7)


def converted_models() -> Iterator[Case]:
    """The small models of the package that came from PyTorch, and its hand-made ones."""
    for folder in sorted([*LIGHT.parent.glob("pytorch-*/*"), *LIGHT.parent.glob("simple/*")]):
        model = onnx.load(folder / "model.onnx")
        data = []
        for place in sorted(folder.glob("test_data_set_*")):
            count = len(list(place.glob("input_*.pb")))
            inputs = [_read(place / f"input_{index}.pb", model.graph.input[index]) for index in range(count)]
            outputs = [_read(place / f"output_{index}.pb", value) for index, value in enumerate(model.graph.output)]
            data.append((inputs, outputs))
        yield Case(folder.name, model, data, 1e-3, 1e-5)


def _read(path: pathlib.Path, value: onnx.ValueInfoProto) -> Any:
    kinds = {"sequence_type": onnx.SequenceProto, "optional_type": onnx.OptionalProto}
    return kinds.get(value.type.WhichOneof("value"), onnx.TensorProto).FromString(path.read_bytes())


def check(case: Case, passes: Sequence[OnnxPass], *, verify: bool = False) -> Outcome:
    try:
        before = prepare(case.model)
    except OnnxModelError as error:
        return Outcome(case.name, "refused", reason=str(error))
    if any(is_random(node, opset(before)) for graph in graphs(before) for node in graph):
        reason = "it draws random numbers: no two runs are equal"
        OnnxPassManager(passes, verify=verify).run(case.model)
        return Outcome(case.name, "refused", reason=reason)
    reasons = []
    for load in (OnnxRuntime, Reference):
        reason = _matches(load, before, case)
        if reason is None:
            break
        reasons.append(f"{load.name}: {reason}")
    else:
        return Outcome(case.name, "refused", reason="no engine gives the shipped outputs; " + "; ".join(reasons))
    after, records = OnnxPassManager(passes, verify=verify).run(case.model)
    nodes, changes = (node_count(before), node_count(after)), sum(len(record.changes) for record in records)
    reason = _matches(load, after, case)
    status = "equal" if reason is None else "different"
    return Outcome(case.name, status, load.name, reason or "", changes, nodes)


def _matches(load: type[Engine], model: ir.Model, case: Case) -> str | None:
    """None when the engine gives the shipped outputs, else why not."""
    names = [str(value.name) for value in model.graph.inputs if not value.is_initializer()]
    try:
        engine = load(model)
        for inputs, expected in case.data:
            feeds = {name: _plain(value) for name, value in zip(names, inputs, strict=False)}
            found = engine.run(feeds)
            for a, b in zip(found, expected, strict=True):
                reason = _unequal(a, b, case)
                if reason:
                    return reason
    except EngineError as error:
        return re.sub(r"/\S+/", "", str(error))[:160]
    return None


def _plain(value: Any) -> Any:
    if isinstance(value, onnx.TensorProto):
        return onnx.numpy_helper.to_array(value)
    if isinstance(value, onnx.SequenceProto):
        return onnx.numpy_helper.to_list(value)
    if isinstance(value, onnx.OptionalProto):
        return onnx.numpy_helper.to_optional(value)
    return value


def _unequal(found: Any, expected: Any, case: Case) -> str | None:
    expected = _plain(expected)
    if isinstance(expected, (list, tuple)) or isinstance(found, list):
        found, expected = list(found), list(expected)
        if len(found) != len(expected):
            return f"{len(found)} items, not {len(expected)}"
        return next((reason for a, b in zip(found, expected, strict=True) if (reason := _unequal(a, b, case))), None)
    if found is None or expected is None:
        return None if found is expected else f"{found!r}, not {expected!r}"
    a, b = np.asarray(found), np.asarray(expected)
    if a.shape != b.shape or (a.dtype != b.dtype and not (a.dtype.kind in "OSU" and b.dtype.kind in "OSU")):
        return f"{a.dtype}{list(a.shape)}, not {b.dtype}{list(b.shape)}"
    if a.dtype.kind in "OSUb":
        return None if a.astype(str).tolist() == b.astype(str).tolist() else "values differ"
    kind = np.complex128 if a.dtype.kind == "c" else np.float64
    close = np.allclose(a.astype(kind), b.astype(kind), case.rtol, case.atol, equal_nan=True)
    return None if close else "values differ"


def summary(outcomes: Sequence[Outcome]) -> dict[str, int]:
    return dict(sorted(Counter(outcome.status for outcome in outcomes).items()))


def table(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What is committed: counts, and each case that is not equal with its reason."""
    engines = Counter(outcome.engine for outcome in outcomes if outcome.status == "equal")
    return {
        "cases": len(outcomes),
        **summary(outcomes),
        "rewritten": sum(outcome.changes > 0 for outcome in outcomes),
        "run by": dict(sorted(engines.items())),
        "refusals": {item.name: item.reason for item in outcomes if item.status != "equal"},
    }
