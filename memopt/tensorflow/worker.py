"""Run one task in this process: `python worker.py TASK FOLDER`, with the request and the reply as JSON in the folder.

A script that imports nothing of memopt: a task that shall show that something works without torch can trust it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any


def run(task: str, folder: Path) -> dict[str, Any]:
    """The task's answer; or its error, with the traceback for those who ask."""
    source = Path(__file__).resolve().parent / "tasks" / f"{task}.py"
    spec = importlib.util.spec_from_file_location(f"memopt_task_{task}", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        return {"answer": module.run(json.loads((folder / "request.json").read_text()), folder)}
    except Exception as error:
        kind = getattr(error, "kind", "failed")
        message = (
            str(error) if kind != "failed" or isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        )
        return {"error": message, "kind": kind, "traceback": traceback.format_exc()}


def main() -> None:
    """Answer the request in the folder that the command line names."""
    folder = Path(sys.argv[2])
    reply = json.dumps(run(sys.argv[1], folder))
    (folder / "reply.json").write_text(reply)
    sys.stdout.flush()
    sys.stderr.flush()
    # TensorFlow's and torch's threads may crash while an interpreter ends, with everything already written.
    os._exit(0)


if __name__ == "__main__":
    main()
