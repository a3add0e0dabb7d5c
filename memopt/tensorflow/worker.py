"""Run one task in this process: `python worker.py TASK FOLDER`, with the request and the reply as JSON in the folder.

A script that imports nothing of memopt: a task that shall show that something works without torch can trust it.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Folder:
    """Where the request, the reply and tensors lie; see `memopt.tensorflow.exchange`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, name: str) -> dict[str, Any]:
        """Arrays by name; they are mapped into memory, not read."""
        import ml_dtypes
        import numpy

        index = json.loads((self.path / f"{name}.json").read_text())
        data = self.path / f"{name}.bin"
        raw = numpy.memmap(data, mode="r") if data.stat().st_size else numpy.empty(0, numpy.uint8)
        found = {}
        for key, (kind, shape, start) in index.items():
            dtype = numpy.dtype(getattr(ml_dtypes, kind, None) or kind)
            count = math.prod(shape)
            found[key] = raw[start : start + count * dtype.itemsize].view(dtype).reshape(shape)
        return found

    def write(self, name: str, arrays: Mapping[str, Any]) -> None:
        """Write arrays as `memopt.tensorflow.exchange.read` wants them."""
        index = {}
        with (self.path / f"{name}.bin").open("wb") as file:
            for key, array in arrays.items():
                index[key] = [array.dtype.name, list(array.shape), file.tell()]
                file.write(array.tobytes())
        (self.path / f"{name}.json").write_text(json.dumps(index))


def run(task: str, folder: Folder) -> dict[str, Any]:
    """The task's answer; or its error, with the traceback for those who ask."""
    source = Path(__file__).resolve().parent / "tasks" / f"{task}.py"
    spec = importlib.util.spec_from_file_location(f"memopt_task_{task}", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        return {"answer": module.run(json.loads((folder.path / "request.json").read_text()), folder)}
    except Exception as error:
        kind = getattr(error, "kind", "failed")
        message = (
            str(error) if kind != "failed" or isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        )
        return {"error": message, "kind": kind, "traceback": traceback.format_exc()}


def main() -> None:
    """Answer the request in the folder that the command line names."""
    folder = Folder(Path(sys.argv[2]))
    reply = json.dumps(run(sys.argv[1], folder))
    (folder.path / "reply.json").write_text(reply)
    sys.stdout.flush()
    sys.stderr.flush()
    # TensorFlow's and torch's threads may crash while an interpreter ends, with everything already written.
    os._exit(0)


if __name__ == "__main__":
    main()
