"""Run by itself in a process of its own, so that what is measured is ONNX Runtime's: without torch, without memopt.

python measure_child.py peak THREADS FEEDS MODEL            the most bytes that a session and three runs take
python measure_child.py latency THREADS FEEDS MODEL MODEL   the median seconds of a run of each, in turns
Prints a JSON list.
"""

import json
import statistics
import sys
import time

import numpy as np
import onnxruntime  # type: ignore[import-untyped]

ROUNDS, SECONDS = 9, 2.0


def session(path: str, threads: int) -> "onnxruntime.InferenceSession":
    """As a user would load the file."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def status(field: str) -> int:
    """Bytes that the kernel says of this process."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{field}:"))


def peak(path: str, threads: int, feeds: "dict[str, np.ndarray]") -> float:
    """The most memory that is held beyond what the process held before."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the high-water mark starts again
    before = status("VmRSS")
    loaded = session(path, threads)
    for _ in range(3):
        loaded.run(None, feeds)
    return status("VmHWM") - before


def latency(paths: "list[str]", threads: int, feeds: "dict[str, np.ndarray]") -> "list[float]":
    """In turns, so that whatever else the machine does falls on all alike."""
    loaded = [session(path, threads) for path in paths]
    times: list[list[float]] = [[] for _ in paths]
    started = time.perf_counter()
    while not times[0] or (len(times[0]) < ROUNDS and time.perf_counter() - started < SECONDS) or len(times[0]) < 3:
        for found, item in zip(times, loaded, strict=True):
            begin = time.perf_counter()
            item.run(None, feeds)
            found.append(time.perf_counter() - begin)
    return [statistics.median(found[1:]) for found in times]


if __name__ == "__main__":
    what, count, given, *models = sys.argv[1:]
    with np.load(given) as archive:
        arrays = {name: archive[name] for name in archive.files}
    if what == "peak":
        print(json.dumps([peak(models[0], int(count), arrays)]))
    else:
        print(json.dumps(latency(models, int(count), arrays)))
