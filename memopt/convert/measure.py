"""What a run of a file takes on this machine's CPU: bytes and seconds, before and after."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from memopt.convert import measure_child
from memopt.onnx.load import OnnxModelError, prepare
from memopt.onnx.passes.order_nodes import peak_bytes
from memopt.onnx.read import weight_bytes

log = logging.getLogger(__name__)

# Models with more weights are not measured: the graph before would have to be written out for it.
MEASURED_BYTES = 500_000_000
_TIMEOUT = 300


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one run takes.

    Attributes:
        estimated_bytes: weights, inputs and the results alive together at the fullest moment of the order of the nodes.
        peak_bytes: the most that a process held to load and run the file in ONNX Runtime, beyond what it held before.
        seconds: the median time of a run, threads as torch has them.
    """

    estimated_bytes: int | None = None
    peak_bytes: int | None = None
    seconds: float | None = None


def costs(
    before: ir.Model, after: ir.Model, files: Sequence[bytes | None], feeds: Mapping[str, Any]
) -> tuple[Cost, Cost]:
    """What the graph as it came and the one that is written take; None for what cannot be had.

    Args:
        files: both as files, in that order; None: not to be run.
        feeds: arrays by input name.
    """
    estimated = [_estimated(model, feeds) for model in (before, after)]
    peaks: list[int | None] = [None, None]
    times: list[float | None] = [None, None]
    if all(file is not None for file in files):
        runs = _measured([file for file in files if file is not None], feeds)
        if runs is not None:
            peaks, times = runs
    first, second = (Cost(*values) for values in zip(estimated, peaks, times, strict=True))
    return first, second


def as_file(model: ir.Model) -> bytes | None:
    """The model's bytes; None where its weights are too large to be measured."""
    return None if weight_bytes(model) > MEASURED_BYTES else ir.to_proto(model).SerializeToString()


def _estimated(model: ir.Model, feeds: Mapping[str, Any]) -> int | None:
    fixed = model.clone()
    for value in fixed.graph.inputs:
        if value.name in feeds:
            value.shape = ir.Shape(np.shape(feeds[str(value.name)]))
    try:
        return peak_bytes(prepare(fixed), {})
    except OnnxModelError as error:
        log.info("no estimate: %s", error)
        return None


def _measured(files: Sequence[bytes], feeds: Mapping[str, Any]) -> tuple[list[int | None], list[float | None]] | None:
    buffer = io.BytesIO()
    arrays: Any = {name: np.asarray(value) for name, value in feeds.items()}
    np.savez(buffer, **arrays)
    with contextlib.ExitStack() as stack:
        given = stack.enter_context(_nameless(buffer.getvalue()))
        paths = [stack.enter_context(_nameless(file)) for file in files]
        try:
            peaks = [int(_child("peak", given, [path])[0]) for path in paths]
            times = _child("latency", given, paths)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            log.info("not measured: %s", error)
            return None
    return list(peaks), list(times)


def _child(what: str, given: tuple[str, int], paths: Sequence[tuple[str, int]]) -> list[float]:
    words = [what, str(torch.get_num_threads()), *(path for path, _ in (given, *paths))]
    kept = [number for _, number in (given, *paths) if number >= 0]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(measure_child.__file__)), *words],
        pass_fds=kept,
        capture_output=True,
        timeout=_TIMEOUT,
        check=True,
    )
    found: list[float] = json.loads(done.stdout)
    return found


@contextlib.contextmanager
def _nameless(content: bytes) -> Iterator[tuple[str, int]]:
    """A file that goes with the process, even if that is killed, and its descriptor; one with a name where need be."""
    if hasattr(os, "memfd_create"):
        number = os.memfd_create("memopt")
        try:
            with open(number, "wb", closefd=False) as file:
                file.write(content)
            yield f"/proc/self/fd/{number}", number
        finally:
            os.close(number)
        return
    with tempfile.TemporaryDirectory(prefix="memopt-") as folder:
        path = Path(folder) / "file"
        path.write_bytes(content)
        yield str(path), -1
