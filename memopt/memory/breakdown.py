"""Where the bytes of a step go."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

_SCALES = (("GB", 10**9, "GiB", 2**30), ("MB", 10**6, "MiB", 2**20), ("kB", 10**3, "KiB", 2**10), ("B", 1, "B", 1))


@dataclasses.dataclass(frozen=True)
class TensorAtPeak:
    """One tensor that is alive at the peak.

    Attributes:
        name: the node that made it, or the parameter's qualified name.
        bytes: of its storage.
        shape: as made, not as viewed later.
        dtype: `float32` and the like.
        source: the user's source line as `file:line, code`; empty when it is not known.
    """

    name: str
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    source: str = ""


@dataclasses.dataclass(frozen=True)
class MemoryBreakdown:
    """What the device holds at the peak of one step, in bytes. Each storage is counted once, under one heading.

    Attributes:
        parameters: trainable and frozen ones; tied weights once.
        buffers: running statistics, masks, constants, and DistributedDataParallel's buckets.
        gradients: one per trainable parameter, where an optimizer or a training step keeps them.
        optimizer_state: as one step of the given optimizer allocates it; 0 without an optimizer.
        inputs: the tensors that the caller passes.
        activations: everything that the step itself makes and that is alive at the peak.
        workspace: what operators need only while they run, at the peak.
        total: the sum of all: the peak of the whole step.
        largest: the ten largest tensors at the peak, largest first.
        others: tensors of the process beside the model's step: another model, an average of weights, a data set.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer_state: int
    inputs: int
    activations: int
    workspace: int
    total: int
    largest: tuple[TensorAtPeak, ...] = ()
    others: int = dataclasses.field(default=0, metadata={"later": True})

    def __str__(self) -> str:
        """An aligned table of the headings, in decimal and binary units, and the largest tensors."""
        decimal, decimal_size, binary, binary_size = scale_of(self.total)
        digits = 0 if decimal_size == 1 else 3
        rows = [("", decimal, binary)]
        for heading, value in self.headings():
            rows.append((heading, f"{value / decimal_size:,.{digits}f}", f"{value / binary_size:,.{digits}f}"))
        lines = align(rows)
        if self.largest:
            tensors = [
                (t.name, f"{t.bytes / decimal_size:,.3f} {decimal}", f"{t.dtype}{list(t.shape)}", t.source)
                for t in self.largest
            ]
            lines += ["", "largest tensors at the peak:", *align(tensors, right=(1,))]
        return "\n".join(lines)

    def headings(self) -> list[tuple[str, int]]:
        """The headings in plain words with their bytes, in the order in which they are printed, the total last."""
        names = [field.name for field in dataclasses.fields(self) if field.name not in ("largest", "others", "total")]
        found = [(name.replace("_", " "), getattr(self, name)) for name in names]
        if self.others:
            found.append(("other tensors of the process", self.others))
        return [*found, ("total", self.total)]


def scale_of(reference: int) -> tuple[str, int, str, int]:
    """The decimal and the binary unit, each with its size in bytes, in which `reference` bytes read well."""
    return next(scale for scale in _SCALES if reference >= scale[1] or scale[1] == 1)


def align(rows: Sequence[Sequence[str]], right: Sequence[int] | None = None) -> list[str]:
    """Lines of equal columns; the columns in `right` (all but the first by default) are aligned to the right."""
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    right = tuple(range(1, len(widths))) if right is None else right
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
