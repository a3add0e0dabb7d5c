"""Keras 3 files (`.keras`, `.h5`) as programs of torch.export."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch.export import ExportedProgram

from memopt.tensorflow.process import call, require

SUFFIXES = (".keras", ".h5", ".hdf5")


@dataclasses.dataclass(frozen=True, eq=False)
class KerasModel:
    """A Keras model in inference.

    Attributes:
        exported: the graph with weights and example inputs; inputs are keyword arguments, the result is a dictionary.
        notes: which axes that the model leaves open are fixed in the graph, and why, one line each.
    """

    exported: ExportedProgram
    notes: tuple[str, ...]


def load_keras(
    path: Path,
    *,
    batch: int = 2,
    inputs: Mapping[str, Sequence[int]] | None = None,
    dynamic: bool = False,
) -> KerasModel:
    """Read a Keras file in a process of its own, with torch as Keras's backend.

    No code in the file is run: a Lambda layer, or a class that is not Keras's own, is refused. The graph was run beside
    Keras's own call on the example inputs.

    Args:
        path: the file.
        batch: how many examples in the example inputs.
        inputs: shapes by input name, where the model leaves axes open.
        dynamic: whether such axes vary in the graph; else they have the example inputs' sizes.

    Raises:
        TensorFlowError: Keras is missing, or the file is broken, or torch.export cannot capture the model.
        UnsafeModelError: the file holds code, or classes that are not Keras's own.
        InputsError: the inputs do not fit the model.
        FileNotFoundError: there is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    require("keras", "h5py", purpose=f"reading {path.suffix}")
    request = {
        "path": str(path),
        "batch": batch,
        "inputs": {name: list(sizes) for name, sizes in (inputs or {}).items()},
        "dynamic": dynamic,
    }
    with tempfile.TemporaryDirectory(prefix="memopt-keras-") as folder:
        # Weights and graph are made on the CPU: whoever wants them elsewhere moves them.
        call("keras_check", {"path": str(path)}, Path(folder))
        answer = call("keras_export", request, Path(folder), environment={"CUDA_VISIBLE_DEVICES": ""})
        exported = torch.export.load(Path(folder) / "model.pt2")
    return KerasModel(exported, tuple(answer["notes"]))
