"""The ONNX package's own material through the command line, file to file, and the counts on record.

python -m benchmarks.material [--every N]     writes benchmarks/results/material.json

Each node test case and each shipped light model goes through `memopt convert in.onnx -o out.onnx`; what was written is
run on the shipped inputs and compared with the shipped outputs. A case is
    equal       rewritten, and equal to the shipped outputs,
    as it was   the very bytes that went in: nothing to rewrite,
    refused     one line on stderr and no file, with the line,
    undecided   rewritten and proved equal to the source, whose shipped outputs no engine here gives,
    different   anything else: there must be none.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime
import torch
from click.testing import CliRunner

from memopt.cli import main as memopt
from memopt.onnx import prepare
from memopt.onnx.engines import OnnxRuntime, Reference
from tests.onnx.material import Case, _matches, light_models, node_cases

STATUSES = ("equal", "as it was", "refused", "undecided", "different")
RESULTS = Path(__file__).resolve().parent / "results" / "material.json"


def outcome(case: Case, folder: Path, words: Sequence[str] = ()) -> tuple[str, str]:
    """What came of a case, and why."""
    given, output = folder / "in.onnx", folder / "out.onnx"
    output.unlink(missing_ok=True)
    model = case.model if isinstance(case.model, onnx.ModelProto) else ir.to_proto(case.model)
    given.write_bytes(model.SerializeToString())
    result = CliRunner().invoke(memopt, ["convert", str(given), "-o", str(output), "--no-measure", *words])
    if result.exit_code:
        line = result.stderr.strip().removeprefix("error: ").replace(str(given), "in.onnx")
        kept = not output.exists() and line.count("\n") == 0 and result.exit_code in (1, 2)
        return ("refused" if kept else "different"), re.sub(r"/\S+/", "", line)[:200]
    if output.stat().st_size > given.stat().st_size:
        return "different", "larger than it was"
    if output.read_bytes() == given.read_bytes():
        return "as it was", ""
    for load in (OnnxRuntime, Reference):
        if _matches(load, prepare(model), case) is None:
            reason = _matches(load, prepare(onnx.load(output)), case)
            return ("equal", "") if reason is None else ("different", f"{load.name}: {reason}")
    return "undecided", "no engine gives the shipped outputs of the shipped model"


def swept(cases: Sequence[Case], words: Sequence[str] = ()) -> dict[str, Any]:
    """Counts, and the reason of each case that is neither equal nor as it was."""
    counts: Counter[str] = Counter()
    reasons = {}
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(cases):
            status, reason = outcome(case, Path(folder), words)
            counts[status] += 1
            if reason:
                reasons[case.name] = f"{status}: {reason}"
            if number % 100 == 99:
                print(f"{number + 1} of {len(cases)}: {dict(counts)}", file=sys.stderr, flush=True)
    row = {status: counts[status] for status in STATUSES}
    return {"cases": len(cases), **row, "seconds": round(time.perf_counter() - started, 1), "reasons": reasons}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=1, help="only every N-th node case; nothing is written then")
    every = parser.parse_args().every
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    nodes = list(node_cases())[::every]
    found = {
        "node cases": swept(nodes),
        "node cases, --target onnxruntime": swept(nodes, ("--target", "onnxruntime")),
        "light models": swept(list(light_models())),
    }
    reasons = {name: item.pop("reasons") for name, item in found.items()}
    for name, item in found.items():
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in item.items()))
    result = {
        "machine": platform.machine(),
        "onnx": onnx.__version__,
        "onnxruntime": onnxruntime.__version__,
        "torch": torch.__version__,
        "rows": [{"material": name, **item} for name, item in found.items()],
        "reasons": reasons,
    }
    if every == 1:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    different = sum(item["different"] for item in found.values())
    if different:
        sys.exit(f"{different} cases are different")


if __name__ == "__main__":
    main()
