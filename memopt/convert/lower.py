"""Fewer bits by request: float16, bfloat16 or int8, and how far the numbers may then be from the source's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx_ir as ir

from memopt.convert.errors import ConversionError
from memopt.convert.narrow import narrowed
from memopt.convert.options import Options
from memopt.convert.precision import NAMES
from memopt.convert.quantize import quantized
from memopt.convert.rewriting import PROVED_BYTES
from memopt.onnx.emulate import narrow_types
from memopt.onnx.manager import OnnxPassRecord, node_count
from memopt.onnx.read import weight_bytes

# What the rounding may change, as a share of an output's largest value: sixteen units in the last place of float16,
# four of bfloat16; of int8 what its 127 steps make of a chain of layers.
ALLOWED: Mapping[str, float] = {"fp16": 16 * 2.0**-10, "bf16": 4 * 2.0**-7, "int8": 0.08}
_ROUNDED = "compared with the result of each operator in lower precision rounded to its type"
_NOT_RUN = (
    "the file itself was not run: ONNX Runtime's CPU has no kernels for bfloat16; with dtype fp16 or fp32 it runs"
)


@dataclasses.dataclass(frozen=True, eq=False)
class Lowered:
    """A model with the bits that were asked for.

    Attributes:
        model: what is written.
        step: what was done, as if by a pass; None: nothing.
        notes: one line each.
        allowed: the share of an output's largest value that may differ.
        stand_in: the graph to run with every result rounded to its type, as kernels for it do: ONNX Runtime's CPU has
            none for bfloat16, and computes chains of float16 operators in float32, which would hide what they lose.
        runs: whether ONNX Runtime's CPU runs the file itself.
    """

    model: ir.Model
    step: OnnxPassRecord | None = None
    notes: tuple[str, ...] = ()
    allowed: float = 0.0
    stand_in: ir.Model | None = None
    runs: bool = True

    def after(self, records: Sequence[OnnxPassRecord]) -> tuple[OnnxPassRecord, ...]:
        """The records of the passes before, and that of what was done."""
        return (*records, *(() if self.step is None else (self.step,)))

    def runnables(self, staged: bytes | Path) -> tuple[bytes | Path | ir.Model, ...]:
        """What is run for the proof: the file that is staged, what stands for it, or both."""
        stand_ins = () if self.stand_in is None else (self.stand_in,)
        return (*stand_ins, staged) if self.runs else stand_ins


def lowered(model: ir.Model, options: Options) -> Lowered:
    """Return the model with the precision that the options ask for.

    Raises:
        ConversionError: nothing in the model can be had in that precision.
    """
    how = options.dtype or options.quantize
    if how in (None, "fp32"):
        return _as_it_came(model, options)
    allowed = ALLOWED[how] if options.tolerance is None else options.tolerance
    note = f"{100 * allowed:.2g} % of an output's largest value is allowed"
    if how == "int8":
        found, summary = quantized(model)
        return Lowered(found, _record("quantize_int8", model, found), (f"{summary}; {note}",), allowed)
    kind = NAMES[how]
    made = narrowed(model, kind)
    runs = kind is not ir.DataType.BFLOAT16
    notes = (f"{made.summary}; {note}", _ROUNDED, *(() if runs else (_NOT_RUN,)))
    step = dataclasses.replace(_record(f"dtype_{how}", model, made.model), refusals=made.refusals)
    return Lowered(made.model, step, notes, allowed, made.model, runs)


def _as_it_came(model: ir.Model, options: Options) -> Lowered:
    """A model whose source is in lower precision already stays in it; its own errors say what rounding may change."""
    narrow = narrow_types(model)
    if narrow and options.dtype == "fp32":
        raise ConversionError("only a PyTorch module is widened to float32: this source stays in its own precision")
    runs = ir.DataType.BFLOAT16 not in narrow
    if not narrow or (runs and weight_bytes(model) > PROVED_BYTES):
        return Lowered(model)
    notes = (_ROUNDED, *(() if runs else (_NOT_RUN,)))
    return Lowered(model, None, notes, stand_in=model, runs=runs)


def _record(name: str, before: ir.Model, after: ir.Model) -> OnnxPassRecord:
    counts = (node_count(before), node_count(after), weight_bytes(before), weight_bytes(after))
    return OnnxPassRecord(name, 0.0, *counts, changes=(), refusals=(), evidence=None)
