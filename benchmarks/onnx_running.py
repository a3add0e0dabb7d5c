"""What running an ONNX file takes and how far its numbers are off, for onnx_files.py: in a process of its own."""

from __future__ import annotations

import ctypes
import json
import re
import statistics
import time
from pathlib import Path
from typing import Any


def run(files: list[Path], folder: Path, device: str, repeats: int, rounds: int) -> list[dict[str, Any]]:
    """Figures for each file. On CUDA all in this process, after each was run once: the driver loads kernels then."""
    import numpy as np

    inputs, outputs = np.load(folder / "inputs.npz"), np.load(folder / "outputs.npz")
    feeds = {name: inputs[name] for name in inputs.files}
    expected = [outputs[name] for name in outputs.files]
    if device == "cpu":
        return [_run_cpu(file, feeds, expected, repeats) for file in files]
    found: list[dict[str, Any]] = [{} for _ in files]
    for number in range(1 + rounds):
        for index, file in enumerate(files):
            if "failed" in found[index]:
                continue
            try:
                row = (
                    _run_cuda(file, feeds, expected, repeats)
                    if number
                    else _run_cuda(file, feeds, expected, 1, trace=True)
                )
            except Exception as error:
                row = {"failed": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"}
            found[index] = better(found[index], row) if number > 1 else row | _kept(found[index], row)
    return found


def _kept(first: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """What only the first round tells: where nodes ran."""
    return {} if "failed" in row else {key: first[key] for key in ("host_nodes", "copies", "slowest") if key in first}


def better(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The least of both figures, but the larger error; a failure stays one."""
    if "failed" in old or "failed" in new:
        return {**old, **new}
    return old | {
        key: max(old.get(key, value), value) if key == "error" else min(old.get(key, value), value)
        for key, value in new.items()
    }


def _run_cpu(file: Path, feeds: dict[str, Any], expected: list[Any], repeats: int) -> dict[str, Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    before = status("VmRSS")
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    feeds = {entry.name: feeds[entry.name] for entry in session.get_inputs()}
    found = session.run(None, feeds)
    errors = [difference(a, b) for a, b in zip(found, expected, strict=False)]
    del found
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    seconds = []
    for _ in range(repeats):
        began = time.thread_time()
        session.run(None, feeds)
        seconds.append(time.thread_time() - began)
    return {
        "peak_bytes": status("VmHWM") - before,
        "seconds": statistics.median(seconds),
        "error": max(errors),
    }


def _run_cuda(
    file: Path, feeds: dict[str, Any], expected: list[Any], repeats: int, *, trace: bool = False
) -> dict[str, Any]:
    import numpy as np
    import onnxruntime
    import torch

    stream = torch.cuda.Stream()
    tensors = {name: torch.from_numpy(value).cuda() for name, value in feeds.items()}
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.enable_profiling = trace
    options.profile_file_prefix = str(file.with_suffix(""))
    cuda = {"arena_extend_strategy": "kSameAsRequested", "use_tf32": "0"}
    cuda |= {"user_compute_stream": str(stream.cuda_stream), "has_user_compute_stream": "1"}
    providers = [("CUDAExecutionProvider", cuda), "CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(str(file), options, providers=providers, enable_fallback=0)
    if "CUDAExecutionProvider" not in session.get_providers():
        raise RuntimeError("the CUDA provider does not load")
    binding = session.io_binding()
    for entry in session.get_inputs():
        value = tensors[entry.name]
        if entry.type == "tensor(float16)":
            value = value.half()
        kind = np.dtype(str(value.dtype).removeprefix("torch."))
        tensors[entry.name] = value
        binding.bind_input(entry.name, "cuda", 0, kind, tuple(value.shape), value.data_ptr())
    for entry in session.get_outputs():
        binding.bind_output(entry.name, "cuda", 0)
    seconds = []
    for _ in range(5):
        session.run_with_iobinding(binding)
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        session.run_with_iobinding(binding)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    taken = before - torch.cuda.mem_get_info()[0]
    found = binding.copy_outputs_to_cpu()
    return (_placed(Path(session.end_profiling())) if trace else {}) | {
        "peak_bytes": taken,
        "seconds": statistics.median(seconds),
        "error": max(difference(a, b) for a, b in zip(found, expected, strict=False)),
    }


def _placed(trace: Path) -> dict[str, Any]:
    """Nodes that ran on the host, copies between host and device, and where the time of all runs went, in ms."""
    events = [event for event in json.loads(trace.read_text()) if event.get("cat") == "Node"]
    trace.unlink()
    kernels = [(event["args"], event["dur"]) for event in events if event["name"].endswith("_kernel_time")]
    nodes = {event["name"]: event["args"] for event in events if event["name"].endswith("_kernel_time")}
    spent: dict[str, float] = {}
    for found, microseconds in kernels:
        name = f"{found['op_name']} {found['provider'].removesuffix('ExecutionProvider')}"
        spent[name] = spent.get(name, 0.0) + microseconds / 1e3
    copies = [item for item in nodes.values() if item["op_name"].startswith("Memcpy")]
    host = [item for item in nodes.values() if item["provider"] == "CPUExecutionProvider"]
    slowest = sorted(spent.items(), key=lambda item: -item[1])[:6]
    return {"host_nodes": len(host), "copies": len(copies), "slowest": {name: round(ms, 3) for name, ms in slowest}}


def difference(found: Any, expected: Any) -> float:
    """The largest difference, as a share of the largest value."""
    import numpy as np

    if found.shape != expected.shape:
        return float("inf")
    a, b = found.astype(np.float64), expected.astype(np.float64)
    return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30))


def status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
