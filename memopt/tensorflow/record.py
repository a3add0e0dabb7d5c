"""The record of one SavedModel, as text and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

from memopt.budget import format_bytes
from memopt.convert.verify import Run


@dataclasses.dataclass(frozen=True)
class Entry:
    """An input or output of a signature; None in the shape is a size that varies."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}[{', '.join('batch' if size is None else str(size) for size in self.shape)}]"


@dataclasses.dataclass(frozen=True)
class TensorFlowExport:
    """What was written, and how it was proved.

    Attributes:
        source: what was exported.
        output: the folder's name; None where nothing was written.
        signature: the name of the signature.
        inputs, outputs: of the signature.
        bytes: of all files.
        memory: of the compiled function at the example inputs, in bytes by use: arguments (weights among them),
            outputs, temporaries, constants; from the compiler's own assignment of buffers.
        compile_seconds: wall time of the first call, in which XLA compiles.
        runs: the comparison with PyTorch, at each batch size.
        notes: what could not be had, one line each.
        seconds: wall time of the steps.
    """

    source: str
    output: str | None
    signature: str
    inputs: tuple[Entry, ...]
    outputs: tuple[Entry, ...]
    bytes: int
    memory: Mapping[str, int]
    compile_seconds: float
    runs: tuple[Run, ...]
    notes: tuple[str, ...]
    seconds: Mapping[str, float]

    def to_text(self) -> str:
        """A few lines for people, ending with a newline."""
        lines = [
            f"{self.source} → {self.output or 'nothing written'} ({self.signature}, {format_bytes(self.bytes)})",
            "inputs   " + ", ".join(map(str, self.inputs)),
            "outputs  " + ", ".join(map(str, self.outputs)),
            "memory   " + ", ".join(f"{use} {format_bytes(size)}" for use, size in self.memory.items() if size),
            *(f"note: {note}" for note in self.notes),
        ]
        errors = [output.max_relative for run in self.runs for output in run.outputs]
        sizes = ", ".join(f"batch {run.sizes['batch']}" for run in self.runs if run.sizes)
        lines.append(
            f"equal to the source in {len(self.runs)} runs of TensorFlow alone{f' ({sizes})' if sizes else ''}: "
            f"largest difference {max(errors, default=0.0):.1e} of the largest value"
        )
        return "\n".join(lines) + "\n"

    def to_json(self) -> str:
        """The whole record as JSON, ending with a newline."""
        content = {"format": "memopt tensorflow export", "version": 1, **dataclasses.asdict(self)}
        return json.dumps(content, indent=2) + "\n"
