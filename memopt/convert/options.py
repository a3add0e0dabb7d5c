"""How to convert: what the command line and `memopt.export` let one choose."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from memopt.convert.rewriting import TARGETS, chosen_passes
from memopt.convert.write import SINGLE_FILE_BYTES
from memopt.onnx import OnnxPass

_OPSETS = range(18, 26)  # what the exporter writes, and the converters between versions reach


@dataclasses.dataclass(frozen=True)
class Options:
    """How to convert.

    Attributes:
        opset: of the standard operators; None: the default for a model, its own for an ONNX file.
        target: "standard" operators only, or with those of "onnxruntime" (com.microsoft), or of these the ones that
            pay on CUDA ("onnxruntime-cuda").
        passes: on the ONNX graph, in order; None: all of the target's.
        repeat: whether they run again until nothing changes.
        dtype: "fp16" or "bf16": weights and operators in it where they allow it; "fp32": a module's own lower precision
            widened; None: as they are.
        quantize: "int8": weights of matrix products in it, activations quantized as they come; None: as they are.
        tolerance: the share of an output's largest value that may differ with `dtype` or `quantize`; None: what
            `memopt.convert.lower` says.
        allow_larger: whether an ONNX file may come out larger than it went in.
        consume: whether the module's weights, where they are large, may be given up once they are written: the proof
            then takes their memory.
        external_above: with more bytes of weights they go to a file beside the model's.
        measure: whether the graph before and after is run for its memory and time.
        notify: called with the name of each step as it begins.
    """

    opset: int | None = None
    target: str = "standard"
    passes: Sequence[OnnxPass] | None = None
    repeat: bool = False
    dtype: str | None = None
    quantize: str | None = None
    tolerance: float | None = None
    allow_larger: bool = False
    consume: bool = False
    external_above: int = SINGLE_FILE_BYTES
    measure: bool = True
    notify: Callable[[str], None] | None = None

    @property
    def pipeline(self) -> tuple[OnnxPass, ...]:
        """The passes to run."""
        wanted = chosen_passes(target=self.target) if self.passes is None else tuple(self.passes)
        return tuple(item for item in wanted if self.dtype in (None, "fp32") or not item.float32_only)


def make_options(
    *,
    opset: int | None = None,
    target: str = "standard",
    dtype: str | None = None,
    quantize: str | None = None,
    tolerance: float | None = None,
    level: int = 2,
    passes: Sequence[str] | None = None,
    skip: Sequence[str] = (),
    allow_larger: bool = False,
    consume: bool = False,
    measure: bool = True,
    notify: Callable[[str], None] | None = None,
) -> Options:
    """Check what a user asked for, and make it definite.

    Args:
        opset, target, dtype, quantize, tolerance, allow_larger, consume, measure, notify: see `Options`.
        level: 0: no pass; 1: those that fuse nothing; 2: all; 3: all, again until nothing changes.
        passes: names of passes, in order, in place of the level's.
        skip: names of passes to leave out.

    Raises:
        ValueError: something is not known; the message lists what is.
    """
    if opset is not None and opset not in _OPSETS:
        raise ValueError(f"opset is {opset!r}: use {_OPSETS[0]} to {_OPSETS[-1]}")
    if target not in TARGETS:
        raise ValueError(f"unknown target {target!r}: use one of {', '.join(TARGETS)}")
    if dtype not in (None, "fp32", "fp16", "bf16"):
        raise ValueError(f"unknown dtype {dtype!r}: use fp32, fp16 or bf16")
    if quantize not in (None, "int8"):
        raise ValueError(f"cannot quantize to {quantize!r}: use int8")
    if dtype is not None and quantize is not None:
        raise ValueError("dtype and quantize do not go together: choose one")
    if tolerance is not None and dtype in (None, "fp32") and quantize is None:
        raise ValueError("a tolerance goes with dtype or quantize: without them only rounding is allowed")
    if tolerance is not None and not 0 < tolerance < 1:
        raise ValueError(f"tolerance is {tolerance!r}: it is a share between 0 and 1")
    if level not in (0, 1, 2, 3):
        raise ValueError(f"level is {level!r}: use 0, 1, 2 or 3")
    return Options(
        opset=opset,
        target=target,
        passes=chosen_passes(level, passes, skip, target=target),
        repeat=level == 3,
        dtype=dtype,
        quantize=quantize,
        tolerance=tolerance,
        allow_larger=allow_larger,
        consume=consume,
        measure=measure,
        notify=notify,
    )
