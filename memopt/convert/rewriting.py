"""The passes on the ONNX graph: which run, and running them with proof."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir

from memopt.convert.errors import ConversionError, DifferenceError
from memopt.onnx import (
    ONNXRUNTIME,
    ONNXRUNTIME_CUDA,
    STANDARD,
    OnnxEvidenceError,
    OnnxModelError,
    OnnxPass,
    OnnxPassError,
    OnnxPassManager,
)
from memopt.onnx.infer import skeleton
from memopt.onnx.manager import OnnxPassRecord
from memopt.onnx.read import weight_bytes

TARGETS: Mapping[str, tuple[OnnxPass, ...]] = {
    "standard": STANDARD,
    "onnxruntime": ONNXRUNTIME,
    "onnxruntime-cuda": ONNXRUNTIME_CUDA,
}
# What stands for each pass of memopt.INFERENCE here, where sizes may vary: a Program has fixed ones. Nothing is lost by
# running on the exported graph: weights are folded in float64 and rounded once in both places (tested to be equal).
COUNTERPARTS: Mapping[str, tuple[str, ...]] = {
    "read_parts": (),  # parts are written by ScatterND there, and a loss in tiles is not what is exported
    "eliminate_copies": ("eliminate_no_ops",),
    "fuse_conv_bn": ("fuse_conv_bn",),
    "fold_constants": ("fold_constants", "simplify_shapes"),
    "merge_common": ("merge_common", "share_initializers"),
    "fuse_attention": ("fuse_attention", "fuse_multi_head_attention"),
    "fuse_norm": ("fuse_normalization",),
    "fuse_matmul_add": ("fuse_matmul_add",),
    "fold_activation": ("fuse_activations",),
    "eliminate_dead": ("eliminate_dead",),
    "reorder": ("order_nodes",),
    "inplace": (),  # ONNX has no writing in place: engines decide on it
}
# The passes that fuse no operators.
_PLAIN = ("eliminate_no_ops", "fold_constants", "share_initializers", "merge_common", "eliminate_dead")
# Above this, models before and after each pass are not run: several copies of the weights would have to be there.
PROVED_BYTES = 1_000_000_000
_MOST_ROUNDS = 4


def chosen_passes(
    level: int = 2, names: Sequence[str] | None = None, skip: Sequence[str] = (), *, target: str = "standard"
) -> tuple[OnnxPass, ...]:
    """The passes to run, in order.

    Args:
        level: 0: none; 1: those that fuse nothing; 2 and 3: all.
        names: these, in this order, in place of the level's.
        skip: all but these.
        target: a key of `TARGETS`: whose passes.

    Raises:
        ValueError: the target has no pass of a name.
    """
    known = {item.name: item for item in TARGETS[target]}
    for name in (*(names or ()), *skip):
        if name in known:
            continue
        others = [other for other, passes in TARGETS.items() if any(item.name == name for item in passes)]
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f" (it is one of target {others[0]})" if others else f" (did you mean {close[0]}?)" if close else ""
        raise ValueError(f"no pass {name!r}{hint}; known: {', '.join(known)}")
    if names is not None:
        wanted = [known[name] for name in names]
    else:
        wanted = [item for item in TARGETS[target] if level >= 2 or (level == 1 and item.name in _PLAIN)]
    return tuple(item for item in wanted if item.name not in skip)


def check_form(model: ir.Model) -> None:
    """Raise ConversionError where ONNX's checker, shape inference included, refuses the graph.

    The inference knows no operators of ONNX Runtime: graphs with any go without it.
    """
    full = set(model.graph.opset_imports) <= {""}
    try:
        onnx.checker.check_model(skeleton(model, declared=True), full_check=full)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ConversionError(f"the graph that was made is not valid ONNX: {error}") from error


def rewritten(
    model: ir.Model,
    passes: Sequence[OnnxPass],
    *,
    inputs: Sequence[Mapping[str, Any]] | None = None,
    repeat: bool = False,
    notify: Callable[[str], None] | None = None,
) -> tuple[ir.Model, tuple[OnnxPassRecord, ...], tuple[str, ...]]:
    """Run the passes; return the model, one record per pass, and what is not proved.

    Args:
        model: the model; it is not changed.
        passes: in order.
        inputs: arrays by input name, one mapping per run; made up by default.
        repeat: run all of them again until nothing changes (four times at most).
        notify: called with the name of each pass as it begins.

    Raises:
        ConversionError: the model cannot be handled, or a pass failed.
        DifferenceError: a pass changed the numbers; the message names it.
    """
    proved = weight_bytes(model) <= PROVED_BYTES
    notes = [] if proved else [f"passes were not proved one by one: weights above {PROVED_BYTES} bytes"]
    records: list[OnnxPassRecord] = []
    for _ in range(_MOST_ROUNDS if repeat else 1):
        try:
            manager = OnnxPassManager(passes, verify=proved, inputs=inputs, notify=notify, record=True)
            model, made = manager.run(model, records)
        except OnnxModelError as error:
            raise ConversionError(f"the ONNX graph cannot be handled: {error}") from error
        except OnnxPassError as error:
            kind = DifferenceError if isinstance(error.__cause__, OnnxEvidenceError) else ConversionError
            raise kind(str(error)) from error
        records += made
        if not any(record.changes for record in made):
            break
    notes += dict.fromkeys(note for record in records if record.changes for note in record.notes)
    return model, tuple(records), tuple(notes) if proved else tuple(notes[:1])
