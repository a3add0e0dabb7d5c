"""The reference models and Hugging Face's under XLA on the CPU: error, compile time, memory by the compiler's analysis.

    python -m benchmarks.xla                   writes results/xla_cpu.json
    python -m benchmarks.xla --only unet --out here.json

Inference is compared with PyTorch's own float64 run. Training steps run without dropout, at shares of what XLA's
executables take without a budget, and are compared with PyTorch's gradients.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

import memopt  # noqa: E402
from benchmarks.xla_least import Seen, least  # noqa: E402
from tests.end_to_end import FAMILIES, HUGGING_FACE, OTHERS, build, gradients, restorer, step  # noqa: E402

TRAINED = ("gpt2", "llama_tiny", "resnet18", "resnet50", "unet")
SHARES = (None, 1.0, 0.6, 0.4)


def tensors(result: Any) -> list[torch.Tensor]:
    values = list(result.values()) if hasattr(result, "values") and not isinstance(result, torch.Tensor) else result
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def error_of(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest difference, relative to the largest value of its tensor."""
    pairs = zip(found, expected, strict=True)
    return max(float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-30)) for a, b in pairs)


def inference(name: str) -> dict[str, Any]:
    model, inputs = build(name, labels=False)
    model.eval()
    wide = copy.deepcopy(model).double()
    wide_inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    with torch.no_grad():
        exact, eager = tensors(wide(**wide_inputs)), tensors(model(**inputs))
        compiled = memopt.compile(model, backend="xla", verify=False)
        start = time.perf_counter()
        found = tensors(compiled(**inputs))
        seconds = time.perf_counter() - start
    report = compiled.report
    return {
        "model": name, "mode": "inference", "seconds": seconds, "error": error_of(found, exact),
        "eager_error": error_of(eager, exact),
        "arguments_bytes": sum(one.arguments for one in report.executables),
        "outputs_bytes": sum(one.outputs for one in report.executables),
        "temporaries_bytes": sum(one.temporaries for one in report.executables),
    }  # fmt: skip


def training(name: str) -> list[dict[str, Any]]:
    model, inputs = build(name)
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for attribute in ("dropout", "attention_dropout"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)
    inputs = {key: torch.cat([value] * 4) for key, value in inputs.items()}
    restore = restorer(model)
    step(model, inputs)
    expected = [value for value in gradients(model) if value is not None]
    rows: list[dict[str, Any]] = []
    for share in SHARES:
        restore()
        torch._dynamo.reset()
        budget = None if share is None else int(rows[0]["peak_bytes"] * share)
        row: dict[str, Any] = {"model": name, "mode": "training", "share": share, "budget_bytes": budget}
        seen = Seen()
        compiled = memopt.compile(model, budget, backend="xla", verify=False, passes=(*memopt.TRAINING, seen))
        start = time.perf_counter()
        try:
            step(compiled, inputs)
        except memopt.BudgetError as refused:
            bound = {} if seen.program is None else {"least": dataclasses.asdict(least(seen.program))}
            rows.append({**row, "minimum_bytes": refused.minimum_bytes, **bound})
            continue
        row["seconds"] = time.perf_counter() - start
        report = compiled.report
        row["gradient_error"] = error_of([g for g in gradients(model) if g is not None], expected)
        row["peak_bytes"] = report.peak_bytes
        row["temporaries_bytes"] = max(one.temporaries for one in report.executables)
        row["executables"] = len(report.executables)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "xla_cpu.json")
    options = parser.parse_args()
    import jax

    rows: list[dict[str, Any]] = []
    for name in (*FAMILIES, *OTHERS, *HUGGING_FACE):
        for mode, names in ((inference, (name,)), (training, TRAINED)):
            if options.only not in name or name not in names:
                continue
            torch._dynamo.reset()
            try:
                found = mode(name)
                rows += found if isinstance(found, list) else [found]
            except Exception as error:  # a failure is a result: its reason goes into the table
                reason = str(error).strip().splitlines()[0]
                rows.append({"model": name, "mode": mode.__name__, "failure": f"{type(error).__name__}: {reason}"})
            print(json.dumps(rows[-1]), flush=True)
    result = {
        "machine": platform.machine(), "threads": torch.get_num_threads(), "torch": torch.__version__,
        "jax": jax.__version__, "rows": rows,
    }  # fmt: skip
    partial = options.out.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(partial, options.out)


if __name__ == "__main__":
    main()
