"""Where a step's time goes: its kernels by name, the gaps between them, and the host's own time."""

from __future__ import annotations

import collections
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Kernels by what their names say, first match first: matrix products, attention, generated kernels.
KINDS = (
    ("attention", ("flash", "fmha", "attention")),
    ("products", ("gemm", "nvjet", "cutlass", "splitk", "cublas")),
    ("convolutions", ("conv", "cudnn", "xmma", "dgrad", "wgrad")),
    ("pointwise", ("triton_poi",)),
    ("reductions", ("triton_red", "triton_per", "triton_mix")),
    ("other generated", ("triton_", "cpp_fused")),
    ("copies", ("memcpy", "memset")),
)


def profiled(step: Callable[[], None], device: str) -> dict[str, Any]:
    """Profile one step that ends with the device idle; times in seconds.

    Returns:
        `kernels`: [name, count, seconds] by time; `kinds`: the same by kind; `busy`: some kernel runs; `gaps`: none
        does, between the first and the last; `host`: what the host takes to enqueue an unprofiled step.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    cuda = device.startswith("cuda")
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as found:
        step()
    wanted = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    events = [
        (event.name, event.time_range.start * 1e-6, event.time_range.end * 1e-6)
        for event in found.events()
        if event.device_type == wanted and (cuda or not event.cpu_children)
    ]
    busy, until = 0.0, 0.0
    for _, start, end in sorted(events, key=lambda event: event[1]):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    span = until - min((start for _, start, _ in events), default=until)
    return {
        "kernels": _totals((name, end - start) for name, start, end in events),
        "kinds": _totals((_kind(name), end - start) for name, start, end in events),
        "busy": busy,
        "gaps": span - busy,
    }


def host_seconds(enqueue: Callable[[], None], wait: Callable[[], None], repeats: int) -> float:
    """The least time in which the host enqueues a step that waits for nothing."""
    best = float("inf")
    for _ in range(repeats):
        wait()
        started = time.perf_counter()
        enqueue()
        best = min(best, time.perf_counter() - started)
    wait()
    return best


def _kind(name: str) -> str:
    lowered = name.lower()
    return next((kind for kind, words in KINDS if any(word in lowered for word in words)), "other")


def _totals(pairs: Any) -> list[list[Any]]:
    counts: collections.Counter[str] = collections.Counter()
    seconds: collections.Counter[str] = collections.Counter()
    for name, taken in pairs:
        counts[name] += 1
        seconds[name] += taken
    return [[name, counts[name], taken] for name, taken in seconds.most_common()]


def table(rows: Sequence[dict[str, Any]], most: int = 25) -> str:
    """The profiles of several rows side by side by kind, then the kernels of each."""
    rows = [row for row in rows if "profile" in row]
    lines = [f"{'ms':18}" + "".join(f"{row['row']:>18}" for row in rows)]
    for key in ("seconds", "busy", "gaps", "host"):
        cells = (row["seconds"] if key == "seconds" else row["profile"][key] for row in rows)
        lines.append(f"{key:18}" + "".join(f"{cell * 1e3:18.2f}" for cell in cells))
    kinds = [{name: (count, taken) for name, count, taken in row["profile"]["kinds"]} for row in rows]
    for kind in dict.fromkeys(name for found in kinds for name in found):
        cells = (found.get(kind, (0, 0.0)) for found in kinds)
        lines.append(f"{kind:18}" + "".join(f"{count:>9} {taken * 1e3:8.2f}" for count, taken in cells))
    for row in rows:
        lines.append(f"-- {row['row']}")
        lines += [
            f"{taken * 1e3:9.3f} {count:5} {name[:150]}" for name, count, taken in row["profile"]["kernels"][:most]
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text())["rows"], *(int(text) for text in sys.argv[2:])))
