"""Evidence for ONNX rewrites: the model before and after on the same inputs, measured against float64."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from memopt.onnx.emulate import Emulated, narrow_types
from memopt.onnx.engines import Engine, EngineError, OnnxRuntime, Reference
from memopt.onnx.float64 import Float64
from memopt.onnx.read import graphs, is_random, opset
from memopt.onnx.samples import Sample

# Errors below this many units in the last place of the largest value are rounding of any correct model.
FLOOR_ULP = 8
# Without a float64 truth, results may differ by this share of the largest value, times the pass's tolerance.
WITHOUT_TRUTH = 2.0**-16
# A truth further than this share of the largest value from what the engine gives is none: one of the two is wrong.
_SAME = 0.02


class OnnxEvidenceError(RuntimeError):
    """The rewritten model's numbers differ by more than the pass declares."""


@dataclasses.dataclass(frozen=True)
class OnnxEvidence:
    """How far a rewritten model is from the one before, over all samples and outputs.

    Attributes:
        engine: what ran both models: "onnxruntime", or "reference" where ONNX Runtime cannot run them.
        samples: one line per set of inputs, its dynamic axes and their sizes.
        max_abs_error: the largest difference between before and after.
        max_rel_error: the same as a share of the largest value of that output.
        max_ulp: the same in units in the last place of the value before.
        error_ratio: the largest float64 error of the model after over that of the model given to the pipeline (over a
            floor of a few units in the last place); None where no float64 truth exists.
        notes: what could not be compared, and why.
    """

    engine: str
    samples: tuple[str, ...]
    max_abs_error: float
    max_rel_error: float
    max_ulp: float
    error_ratio: float | None
    notes: tuple[str, ...] = ()


class Witness:
    """Runs one model once, keeps what it gave, and compares rewritten models with it.

    Attributes:
        samples: the inputs that the model runs on.
        notes: what is not proved, and why; nothing is proved when `samples` is empty.
    """

    def __init__(self, model: ir.Model, candidates: Sequence[Sample], count: int = 2) -> None:
        """Run the model as given on the first `count` candidates that it accepts."""
        self.samples: list[Sample] = []
        self.notes: list[str] = []
        self._load: Callable[[ir.Model], Engine] = OnnxRuntime
        self._given: list[list[Any]] = []
        self._truth: list[list[Any] | None] | None = None
        if any(is_random(node, opset(model)) for graph in graphs(model) for node in graph):
            self.notes.append("not compared: the model draws random numbers")
            return
        engine = self._engine(model)
        if engine is None:
            return
        refusal = ""
        for sample in candidates:
            if len(self.samples) == count:
                break
            try:
                given = engine.run(sample.feeds)
            except EngineError as error:
                refusal = str(error)
                continue
            self.samples.append(sample)
            self._given.append(given)
        if not self.samples:
            self.notes.append(f"not compared: the model runs on no inputs that were tried ({refusal})")
        self._model = model
        self.before = self._given

    def compare(self, model: ir.Model, tolerance: float) -> OnnxEvidence | None:
        """Run a rewritten model on the samples; None when nothing can be compared.

        Args:
            tolerance: 0.0 asks for bitwise equality with the model before; else the error against float64 may reach
                this many times the given model's.

        Raises:
            OnnxEvidenceError: the numbers differ by more than that, or the model no longer runs.
        """
        if not self.samples:
            return None
        try:
            engine = self._load(model)
            found = [engine.run(sample.feeds) for sample in self.samples]
        except EngineError as error:
            raise OnnxEvidenceError(f"{self._load.__name__} no longer runs the model: {error}") from error
        truths = self.truths() if tolerance else [None] * len(found)
        tally = _Tally([str(value.name) for value in model.graph.outputs])
        failures: list[str] = []
        for index, after in enumerate(found):
            try:
                tally.compare(self.before[index], after, self._given[index], truths[index], tolerance)
            except OnnxEvidenceError as error:
                failures.append(f"{error} ({self.samples[index]})")
        if failures:
            raise OnnxEvidenceError(failures[0] + self._second_opinion(model, tolerance))
        self.before = found
        return OnnxEvidence(
            engine.name,
            tuple(str(sample) for sample in self.samples),
            tally.max_abs,
            tally.max_rel,
            tally.max_ulp,
            tally.ratio,
            tuple(self.notes),
        )

    def _engine(self, model: ir.Model) -> Engine | None:
        reasons = []
        engines = (Emulated, OnnxRuntime, Reference) if narrow_types(model) else (OnnxRuntime, Reference)
        for load in engines:
            try:
                engine = load(model)
            except EngineError as error:
                reasons.append(f"{load.name}: {error}")
                continue
            self._load = load
            self.notes += [f"run by {load.name}, not by {reason}" for reason in reasons]
            return engine
        self.notes.append("not compared: " + "; ".join(reasons))
        return None

    def truths(self) -> list[list[Any] | None]:
        """What the given model computes in float64, per sample, found when it is first asked for."""
        if self._truth is not None:
            return self._truth
        model, self._truth = self._model, []
        try:
            engine = Float64(model)
        except EngineError as error:
            self.notes.append(f"no float64 truth: {error}")
            self._truth = [None] * len(self.samples)
            return self._truth
        for sample, given in zip(self.samples, self._given, strict=True):
            try:
                truth = engine.run(sample.feeds)
            except EngineError as error:
                self.notes.append(f"no float64 truth for {sample}: {error}")
                self._truth.append(None)
                continue
            far = [str(value.name) for value, a, b in zip(model.graph.outputs, given, truth, strict=True) if _far(a, b)]
            if far:
                self.notes.append(f"no float64 truth for {sample}: the evaluators disagree on {', '.join(far)}")
            self._truth.append(None if far else truth)
        return self._truth

    def _second_opinion(self, model: ir.Model, tolerance: float) -> str:
        """What the reference evaluator says of a difference that ONNX Runtime shows."""
        if self._load is Reference:
            return ""
        try:
            engine = Reference(model)
            after = [engine.run(sample.feeds) for sample in self.samples]
            tally = _Tally([str(value.name) for value in model.graph.outputs])
            truths = self.truths()
            for index, values in enumerate(after):
                tally.compare(self.before[index], values, self._given[index], truths[index], max(tolerance, 1.0))
        except EngineError as error:
            return f"; the reference evaluator cannot tell: {error}"
        except OnnxEvidenceError:
            return "; the reference evaluator says so too"
        return "; the reference evaluator finds no difference"


class _Tally:
    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.max_abs = self.max_rel = self.max_ulp = 0.0
        self.ratio: float | None = None

    def compare(self, before: Any, after: Any, given: Any, truth: Any, tolerance: float) -> None:
        if len(before) != len(after):
            raise OnnxEvidenceError(f"{len(before)} outputs before, {len(after)} after")
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            self._value(self.names[index], old, new, given[index], None if truth is None else truth[index], tolerance)

    def _value(self, name: str, old: Any, new: Any, given: Any, truth: Any, tolerance: float) -> None:
        if isinstance(old, list) and isinstance(new, list):
            if len(old) != len(new):
                raise OnnxEvidenceError(f"{name}: {len(old)} items before, {len(new)} after")
            for index, (a, b) in enumerate(zip(old, new, strict=True)):
                at = None if truth is None else truth[index]
                self._value(f"{name}[{index}]", a, b, given[index], at, tolerance)
            return
        if not isinstance(old, np.ndarray) or not isinstance(new, np.ndarray):
            if type(old) is not type(new) or (old is not None and not np.array_equal(old, new)):
                raise OnnxEvidenceError(f"{name}: is {_short(new)}, was {_short(old)}")
            return
        self._array(name, old, new, given, truth, tolerance)

    def _array(self, name: str, old: Any, new: Any, given: Any, truth: Any, tolerance: float) -> None:
        if old.dtype != new.dtype or old.shape != new.shape:
            raise OnnxEvidenceError(f"{name}: {new.dtype}{list(new.shape)}, was {old.dtype}{list(old.shape)}")
        if not is_floating(old):
            if not np.array_equal(old, new):
                raise OnnxEvidenceError(f"{name}: {int(np.sum(old != new))} of {old.size} values differ")
            return
        absolute, largest, ulps = difference(old, new, name)
        spacing = ulp_of(largest, old.dtype)
        self.max_abs, self.max_ulp = max(self.max_abs, absolute), max(self.max_ulp, ulps)
        self.max_rel = max(self.max_rel, absolute / largest if largest else (math.inf if absolute else 0.0))
        if tolerance == 0.0:
            if absolute:
                raise OnnxEvidenceError(f"{name}: differs by {absolute:.3g}, and was to be bitwise equal")
            return
        if truth is None:
            allowed = max(WITHOUT_TRUTH * largest, FLOOR_ULP * spacing) * tolerance
            absolute = difference(given, new, name)[0]
            if absolute > allowed:
                raise OnnxEvidenceError(f"{name}: differs by {absolute:.3g} from the given model, above {allowed:.3g}")
            return
        floor = FLOOR_ULP * spacing
        error = difference(truth, new.astype(np.float64), name)[0]
        known = max(difference(truth, given.astype(np.float64), name)[0], floor)
        ratio = max(error, floor) / known if known else 1.0
        self.ratio = max(self.ratio or 0.0, ratio)
        if ratio > tolerance:
            raise OnnxEvidenceError(
                f"{name}: float64 error {error:.3g}, {ratio:.3g} times the given model's; {tolerance:g} is declared"
            )


def is_floating(array: np.ndarray[Any, Any]) -> bool:
    """Whether the array holds floating-point or complex numbers, those that numpy does not know included."""
    return array.dtype.kind in "fc" or array.dtype.name.startswith(("bfloat", "float"))


def difference(old: np.ndarray[Any, Any], new: np.ndarray[Any, Any], name: str) -> tuple[float, float, float]:
    """The largest absolute difference, the largest finite magnitude before, and the difference in ulps of each value.

    Raises:
        OnnxEvidenceError: NaN or infinity stand in different places.
    """
    if not old.size:
        return 0.0, 0.0, 0.0
    kind = np.complex128 if old.dtype.kind == "c" else np.float64
    a, b = old.astype(kind), new.astype(kind)
    finite = np.isfinite(a)
    if not np.array_equal(finite, np.isfinite(b)) or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        raise OnnxEvidenceError(f"{name}: NaN or infinity in other places than before")
    if not finite.any():
        return 0.0, 0.0, 0.0
    a, b = a[finite], b[finite]
    gap = np.abs(a - b)
    information = _limits(old.dtype)
    size = np.maximum(np.abs(a), information[1])
    ulps = gap / (2.0 ** np.floor(np.log2(size)) * information[0])
    return float(gap.max()), float(np.abs(a).max()), float(ulps.max())


def ulp_of(value: float, dtype: np.dtype[Any]) -> float:
    """The distance from a magnitude to the next number of the dtype."""
    epsilon, tiny = _limits(dtype)
    return float(2.0 ** math.floor(math.log2(max(value, tiny))) * epsilon)


def _limits(dtype: np.dtype[Any]) -> tuple[float, float]:
    """Machine epsilon and smallest normal number."""
    information: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    return float(information.eps), float(information.smallest_normal)


def _far(a: Any, b: Any) -> bool:
    """Whether two evaluators give different answers altogether, not two roundings of one."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) != len(b) or any(_far(x, y) for x, y in zip(a, b, strict=True))
    if not isinstance(a, np.ndarray) or not isinstance(b, np.ndarray):
        return type(a) is not type(b)
    if a.shape != b.shape:
        return True
    if not is_floating(a):
        return not np.array_equal(a, b)
    try:
        absolute, largest, _ = difference(b, a.astype(b.dtype), "")
    except OnnxEvidenceError:
        return True
    return absolute > _SAME * largest


def _short(value: Any) -> str:
    return f"{value!r:.80}"
