"""Proof that an ONNX model computes what the model computes: real runs at several shapes, beside float64."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from memopt.convert.arrays import to_array, to_tensor
from memopt.convert.capture import Axis, Captured
from memopt.convert.errors import ConversionError, DifferenceError
from memopt.convert.reference import run, run_wide
from memopt.errors import first_line
from memopt.onnx.emulate import Emulated

HIDDEN_NOTE = (
    "where a place sees only places that the attention mask hides, ONNX and PyTorch compute different numbers; "
    "whatever does not depend on hidden tokens is equal"
)

log = logging.getLogger(__name__)

# ONNX Runtime sums in another order than PyTorch: its error may be this many times PyTorch's own.
RATIO = 10.0
# Errors below this many units in the last place of the output's largest value are rounding of any correct graph.
FLOOR_ULP = {torch.float64: 64, torch.float32: 64, torch.float16: 16, torch.bfloat16: 4}
# How many sets of inputs a model is compared on whose shapes are fixed.
_FIXED_RUNS = 3


@dataclasses.dataclass(frozen=True)
class OutputEvidence:
    """One output in one run.

    Attributes:
        max_abs, max_relative, max_ulp: the largest difference to PyTorch: absolute, relative to the output's largest
            value, and in units in the last place of PyTorch's value.
        error: the largest difference to the float64 reference; to PyTorch where there is none.
        torch_error: PyTorch's own largest difference to the reference; None where there is none.
    """

    name: str
    max_abs: float
    max_relative: float
    max_ulp: float
    error: float
    torch_error: float | None


@dataclasses.dataclass(frozen=True)
class Run:
    """One set of inputs: the sizes of the axes that vary, by label, and what was found for each output.

    Attributes:
        visible_only: whether the outputs agree only where the model's own do not depend on tokens that the attention
            mask hides: what is computed for a hidden place that sees no other differs from engine to engine.
    """

    sizes: Mapping[str, int]
    outputs: tuple[OutputEvidence, ...]
    visible_only: bool = False


class Runner:
    """An ONNX Runtime session on the CPU, with its optimizations on, as a user would run the file.

    A graph that is not a file yet goes without them, each result of lower precision rounded by itself.
    """

    def __init__(self, model: bytes | Path | ir.Model) -> None:
        import onnxruntime  # type: ignore[import-untyped]

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        try:
            if isinstance(model, ir.Model):
                engine = Emulated(model)
                self._run: Callable[[Mapping[str, Any]], Sequence[Any]] = engine.run
                self.input_names = tuple(str(value.name) for value in model.graph.inputs)
                return
            given = model if isinstance(model, bytes) else str(model)
            session = onnxruntime.InferenceSession(given, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise ConversionError(f"ONNX Runtime refuses the model: {reason_of(error)}") from error
        self._run = lambda feeds: session.run(None, feeds)
        self.input_names = tuple(entry.name for entry in session.get_inputs())

    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Run on these inputs; names that the graph does not have are left out.

        Raises:
            ConversionError: ONNX Runtime stops.
        """
        feeds = {name: to_array(inputs[name]) for name in self.input_names}
        try:
            return [to_tensor(value) for value in self._run(feeds)]
        except Exception as error:
            raise ConversionError(f"ONNX Runtime cannot run the model: {reason_of(error)}") from error


def reason_of(error: BaseException) -> str:
    """The first line of an error's message, without ONNX Runtime's mark in front."""
    return first_line(error).removeprefix("[ONNXRuntimeError] : ")


def trials(axes: Sequence[Axis]) -> list[dict[str, int]]:
    """Sizes to try, by label: the example's own, larger and smaller ones, and the smallest; one where none varies."""
    made: list[dict[str, int]] = [{axis.label: axis.example for axis in axes}]
    labels = list(made[0])
    for number in (1, 2, 3):
        sizes = {}
        for place, label in enumerate(labels):
            same = [axis for axis in axes if axis.label == label]
            # torch.export never sees sizes below two, but a batch of one is what most people run.
            low = max(1 if axis.low <= 2 else axis.low for axis in same)
            example = made[0][label]
            high = min(axis.high or 2 * example + 3 for axis in same)
            wanted = (example + 1 + place, (example + 1) // 2 + place, low)[number - 1]
            sizes[label] = min(max(wanted, low), high)
        if sizes not in made:
            made.append(sizes)
    return made


def made_inputs(captured: Captured, sizes: Mapping[str, int], seed: int) -> dict[str, Any]:
    """Inputs of the given sizes with values like the example's.

    Attention masks hide the end of the last row where the seed is odd and the start of the first where it is even: a
    row that begins with hidden places has scores that are hidden altogether, which engines treat in different ways.
    Tokens at hidden places are the least of the example's, as padding is: some models look for the greatest.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = captured.shapes_at({axis.symbol: sizes[axis.label] for axis in captured.axes})
    made: dict[str, Any] = {}
    for name, value in captured.inputs.items():
        made[name] = value
        if name in shapes:
            made[name] = like(value, shapes[name], generator)
            if name.endswith("attention_mask") and made[name].dim() == 2 and made[name].shape[1] > 1:
                _hide(made[name], seed)
    return _padded(captured, made, torch.Tensor.min)


def _padded(
    captured: Captured, inputs: Mapping[str, Any], pick: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, Any]:
    """The inputs with one token, picked from the example's, wherever a mask hides them."""
    made = dict(inputs)
    for name in inputs:
        place = name.replace("attention_mask", "input_ids")
        tokens, mask = made.get(place), made[name]
        if place != name and isinstance(tokens, torch.Tensor) and tokens.shape == mask.shape:
            made[place] = tokens.masked_fill(mask == 0, int(pick(captured.inputs[place])))
    return made


def _hide(mask: torch.Tensor, seed: int) -> None:
    hidden = mask.shape[1] // 3 or 1
    if seed % 2:
        mask[-1, -hidden:] = 0
    else:
        mask[0, :hidden] = 0


def like(value: torch.Tensor, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """A tensor of another shape with values like these: floats of the same mean and spread, else drawn from them."""
    if not value.numel():
        return value.new_zeros(shape)
    if value.is_floating_point():
        wide = value.double()
        spread = wide.std() if value.numel() > 1 else wide.abs()
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        return (noise * spread + wide.mean()).to(value.dtype)
    return value.flatten()[torch.randint(value.numel(), tuple(shape), generator=generator)]


@dataclasses.dataclass(frozen=True, eq=False)
class Expectation:
    """What the model itself makes of one set of inputs.

    Attributes:
        sizes: of the axes that vary, by label.
        inputs: the tensors among the inputs, by name.
        outputs: in the model's own precision.
        reference: in float64; None where the model's code does not allow it.
        settled: which values of the outputs do not depend on tokens that the attention mask hides; None: nothing is
            hidden.
    """

    sizes: Mapping[str, int]
    inputs: Mapping[str, torch.Tensor]
    outputs: Sequence[torch.Tensor]
    reference: Sequence[torch.Tensor] | None
    settled: Sequence[torch.Tensor] | None = None


def expect(captured: Captured) -> list[Expectation]:
    """Run the model itself at several shapes.

    Raises:
        ConversionError: it does not run on its example inputs.
    """
    made = []
    sizes_tried = trials(captured.axes)
    for seed, sizes in enumerate(sizes_tried if len(sizes_tried) > 1 else sizes_tried * _FIXED_RUNS):
        inputs = dict(captured.inputs) if seed == 0 else made_inputs(captured, sizes, seed)
        try:
            expected = run(captured.function, inputs)
        except Exception as error:
            if seed == 0:
                raise ConversionError(f"the model cannot be run: {reason_of(error)}") from error
            log.info("the model does not take %s: %s", sizes, error)
            continue
        tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        reference, settled = run_wide(captured.function, inputs), _independent(captured, inputs, expected)
        made.append(Expectation(sizes, tensors, expected, reference, settled))
    return made


def _independent(
    captured: Captured, inputs: Mapping[str, Any], outputs: Sequence[torch.Tensor]
) -> list[torch.Tensor] | None:
    """Which values of the model's own outputs stay the same, to rounding, with other tokens at the hidden places."""
    other = _padded(captured, inputs, torch.Tensor.max)
    if all(
        other[name] is value or not isinstance(value, torch.Tensor) or other[name].equal(value)
        for name, value in inputs.items()
    ):
        return None
    found = []
    for a, b in zip(outputs, run(captured.function, other), strict=True):
        same = torch.ones_like(a, dtype=torch.bool) if a.shape != b.shape else (a == b) | ((a != a) & (b != b))
        finite = a[a.isfinite()] if a.is_floating_point() else a[:0]
        if finite.numel() and a.shape == b.shape:
            same |= (a - b).abs() <= FLOOR_ULP[a.dtype] * torch.finfo(a.dtype).eps * float(finite.abs().max())
        # Of the many values of one place (batch, sequence), a logit for each word, some are the same by chance.
        found.append(same.all(-1, keepdim=True).expand_as(same) if same.ndim > 2 else same)
    return found


def verify(
    expected: Sequence[Expectation], model: bytes | Path | ir.Model, names: Sequence[str], allowed: float = 0.0
) -> tuple[Run, ...]:
    """Run the ONNX model on the same inputs and compare every output; `allowed` is as in `compare`.

    Raises:
        DifferenceError: an output differs by more than rounding, in shape or in type; the message names it.
        ConversionError: ONNX Runtime stops.
    """
    runner = Runner(model)
    return tuple(_compared(item, names, runner(item.inputs), allowed) for item in expected)


def _compared(item: Expectation, names: Sequence[str], found: Sequence[torch.Tensor], allowed: float) -> Run:
    """Compare all of the outputs, or where that fails for what no one reads, all but the hidden places."""
    where = _where(item.sizes)
    try:
        return Run(item.sizes, compare_all(names, found, item.outputs, item.reference, where, allowed))
    except DifferenceError:
        if item.settled is None:
            raise
        found, outputs = _settled(found, item.settled), _settled(item.outputs, item.settled)
        reference = None if item.reference is None else _settled(item.reference, item.settled)
        return Run(item.sizes, compare_all(names, found, outputs, reference, where, allowed), visible_only=True)


def _settled(values: Sequence[torch.Tensor], masks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs with zeros where the masks are False; those of another shape as they are."""
    return [
        value.masked_fill(~mask, 0) if value.shape == mask.shape else value
        for value, mask in zip(values, masks, strict=True)
    ]


def _where(sizes: Mapping[str, int]) -> str:
    return f" at {', '.join(f'{label} {size}' for label, size in sizes.items())}" if sizes else ""


def compare_all(
    names: Sequence[str],
    found: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    reference: Sequence[torch.Tensor] | None,
    where: str = "",
    allowed: float = 0.0,
) -> tuple[OutputEvidence, ...]:
    """Compare output by output.

    Raises:
        DifferenceError: see `compare`; or the numbers of outputs differ.
    """
    if not len(names) == len(found) == len(expected):
        raise DifferenceError(f"{len(expected)} outputs in PyTorch, {len(found)} in ONNX{where}")
    wide: Sequence[torch.Tensor | None] = reference if reference is not None else [None] * len(expected)
    return tuple(
        compare(name, a, b, c, where, allowed) for name, a, b, c in zip(names, found, expected, wide, strict=True)
    )


def compare(
    name: str,
    found: torch.Tensor,
    expected: torch.Tensor,
    reference: torch.Tensor | None,
    where: str = "",
    allowed: float = 0.0,
) -> OutputEvidence:
    """How far an output is from PyTorch's, and both from float64.

    Args:
        allowed: a share of the output's largest value that is allowed besides, for graphs of lower precision.
        where: said after the output's name in errors.
        name, found, expected, reference: the output in ONNX, in PyTorch, and in float64.

    Raises:
        DifferenceError: type or shape differ; integers or booleans differ; NaN or infinity stand elsewhere; or the
            float64 error is above RATIO times PyTorch's own and above the rounding of the largest value.
    """
    if found.dtype != expected.dtype or found.shape != expected.shape:
        was, now = f"{expected.dtype}{list(expected.shape)}", f"{found.dtype}{list(found.shape)}"
        raise DifferenceError(f"output {name} is {now}, in PyTorch {was}{where}")
    if not expected.is_floating_point():
        if not torch.equal(found, expected):
            count = int((found != expected).sum())
            raise DifferenceError(f"output {name}: {count} of {expected.numel()} values differ from PyTorch's{where}")
        return OutputEvidence(name, 0.0, 0.0, 0.0, 0.0, 0.0)
    if not expected.numel():
        return OutputEvidence(name, 0.0, 0.0, 0.0, 0.0, 0.0)
    finite = expected.isfinite()
    if not torch.equal(finite, found.isfinite()) or not torch.equal(
        expected[~finite].nan_to_num(7.0), found[~finite].nan_to_num(7.0)
    ):
        raise DifferenceError(f"output {name}: NaN or infinite in other places than PyTorch's{where}")
    a, b = found[finite].double(), expected[finite].double()
    if not b.numel():
        return OutputEvidence(name, 0.0, 0.0, 0.0, 0.0, 0.0)
    eps = torch.finfo(expected.dtype).eps
    scale = float(b.abs().max())
    gap = (a - b).abs()
    unit = (eps * b.abs()).clamp_min(torch.finfo(expected.dtype).tiny)
    max_abs, max_ulp = float(gap.max()), float((gap / unit).max())
    error, torch_error = max_abs, None
    if reference is not None:
        wide = reference.double()[finite]
        error, torch_error = float((a - wide).abs().max()), float((b - wide).abs().max())
    limit = RATIO * (torch_error or 0.0) + FLOOR_ULP[expected.dtype] * eps * scale + allowed * scale
    if not math.isfinite(error) or error > limit:
        of = "float64" if reference is not None else "PyTorch"
        limits = f"{limit:.3g} is allowed (PyTorch itself: {torch_error or 0:.3g})"
        raise DifferenceError(f"output {name} is off by {error:.3g} from {of}{where}: {limits}")
    return OutputEvidence(name, max_abs, max_abs / scale if scale else 0.0, max_ulp, error, torch_error)
