"""Comparison: what each engine took for one model, as plain data."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

SCHEMA = "memopt-comparison"
VERSION = 1

# An engine's error is rounding of a correct program up to this many times eager's, and up to this many units in the
# last place of the largest value where eager's is smaller.
ALLOWED_RATIO, ALLOWED_UNITS = 16.0, 64.0


@dataclasses.dataclass(frozen=True)
class Row:
    """What one engine took.

    Attributes:
        name: the engine, and what it was asked for behind a colon: `inductor`, `inductor:8GB`, `compile:0.5`.
        reason: why there are no figures; empty where there are.
        seconds: wall time of each timed step, the device's work included.
        first_seconds: of the first step, everything that is done once included (capture, planning, compilation).
        allocated_bytes: the most that PyTorch's allocator had given out at once, everything resident included; None
            where the engine allocates elsewhere.
        reserved_bytes: CUDA: the most that the caching allocator held from the driver.
        process_bytes: CUDA: what the process held of the device, the driver's context and every library included,
            None where that is not known, as others on the device let go of theirs meanwhile; CPU: the most resident
            memory of the process during the timed steps, Python and libraries included.
        predicted_bytes: the peak that memopt predicted for the step; None for peers.
        budget_bytes: the budget that was asked for; None without one.
        minimum_bytes: the minimum that memopt says it can keep; None where it does not say.
        error: root of the summed squared differences of all floating-point outputs to float64's, over that of
            float64's; None where it is not known.
        gradient_error: the same of all gradients of parameters; None for inference and where it is not known.
        differs: whether an error is above what rounding explains.
        notes: what the engine says of its run.
    """

    name: str
    reason: str = ""
    seconds: tuple[float, ...] = ()
    first_seconds: float | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    process_bytes: int | None = None
    predicted_bytes: int | None = None
    budget_bytes: int | None = None
    minimum_bytes: int | None = None
    error: float | None = None
    gradient_error: float | None = None
    differs: bool = False
    notes: tuple[str, ...] = ()

    @property
    def is_peer(self) -> bool:
        """Whether the row is not memopt's."""
        return self.name.partition(":")[0] in ("eager", "compile", "checkpoint")

    @property
    def median(self) -> float | None:
        """The median of the timed steps, in seconds."""
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def spread(self) -> float | None:
        """Half the distance between the quartiles of the timed steps, in seconds; None for fewer than two."""
        if len(self.seconds) < 2:
            return None
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / 2


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One model on several engines.

    Attributes:
        model: its name.
        mode: what a step is.
        device: the device's name.
        dtype: of the parameters.
        rows: one per engine and setting, in the order asked for.
        settings: what was asked for: batch, warm-up and timed steps, optimizer, seconds allowed …
        versions: of torch, of the engines' libraries and of the device's driver.
        notes: what concerns all rows.
    """

    model: str
    mode: Literal["inference", "training"]
    device: str
    dtype: str
    rows: tuple[Row, ...]
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    notes: tuple[str, ...] = ()

    @property
    def differs(self) -> bool:
        """Whether some engine's numbers are off by more than rounding explains."""
        return any(row.differs for row in self.rows)

    def to_json(self) -> str:
        """The whole record as strict JSON, ending with a newline; an infinite or undefined error is a string."""
        content = {"schema": SCHEMA, "version": VERSION, **dataclasses.asdict(self)}
        for row in content["rows"]:
            for name in ("error", "gradient_error"):
                if row[name] is not None and not math.isfinite(row[name]):
                    row[name] = str(row[name])
        return json.dumps(content, indent=1, allow_nan=False) + "\n"

    def to_html(self) -> str:
        """One self-contained page with plots."""
        from memopt.comparison.page import to_html

        return to_html(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the comparison as JSON, as one self-contained HTML page or as text, by the path's suffix.

        The file is written whole or not at all; an existing one is replaced.

        Raises:
            ValueError: the suffix is none of .json, .html and .txt.
            OSError: the file cannot be written.
        """
        from memopt.report.files import write_whole

        forms = {".json": self.to_json, ".html": self.to_html, ".txt": self.__str__}
        suffix = Path(path).suffix.lower()
        if suffix not in forms:
            raise ValueError(
                f"cannot save a comparison as {Path(path).name!r}: the name must end in .json, .html or .txt"
            )
        write_whole(path, forms[suffix]())

    def __str__(self) -> str:
        """The comparison as a table."""
        from memopt.comparison.text import to_text

        return to_text(self)


def judged(rows: tuple[Row, ...], dtype: torch.dtype) -> tuple[Row, ...]:
    """The rows with `differs` set where an error is above what rounding explains, measured by eager's own error."""
    eager = next((row for row in rows if row.name == "eager" and not row.reason), Row("eager"))
    floor = ALLOWED_UNITS * torch.finfo(dtype).eps

    def too_large(found: float | None, usual: float | None) -> bool:
        return found is not None and not found <= max(ALLOWED_RATIO * (usual or 0.0), floor)

    return tuple(
        dataclasses.replace(
            row,
            differs=too_large(row.error, eager.error) or too_large(row.gradient_error, eager.gradient_error),
        )
        for row in rows
    )
