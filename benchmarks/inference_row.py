"""The process of one row of inference.py: a model on one engine, compiled, timed, and compared with float64."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from row_process import used_bytes

SIZES: dict[str, dict[str, int]] = {
    "resnet50": {"batch": 32, "resolution": 224},
    "densenet121": {"batch": 32, "resolution": 224},
    "vit_b_16": {"batch": 32, "resolution": 224},
    "bert_base": {"batch": 8, "sequence": 128},
    "gpt2": {"batch": 4, "sequence": 512},
    "unet": {"batch": 8, "resolution": 256},
}
CONVOLUTIONAL = ("resnet50", "densenet121", "unet")
PROFILED = ("memopt", "freezing")


def build(given: argparse.Namespace) -> Any:
    """The model with random weights: for BERT the encoder, whose hidden states are the result."""
    import torch

    import memopt
    from memopt.models.bert import Encoder

    torch.manual_seed(0)
    if given.model != "bert_base":
        return memopt.models.build(given.model, tiny=given.tiny).eval()
    small = {"layers": 2, "width": 32, "heads": 4, "hidden": 64, "vocabulary": 128, "positions": 32}
    return Encoder(pooler=False, **(small if given.tiny else {})).eval()


def example_inputs(given: argparse.Namespace, model: Any) -> dict[str, Any]:
    import torch

    sizes = {"batch": 2} if given.tiny else SIZES[given.model]
    torch.manual_seed(1)
    if given.model == "bert_base":
        return {"input_ids": torch.randint(128, (sizes["batch"], sizes.get("sequence", 16)))}
    return dict(model.example_inputs(**sizes))


def write_reference(given: argparse.Namespace) -> None:
    """Write weights, with batch norms that have seen the inputs, the inputs, and the results in float64."""
    import torch

    model, dtype = build(given), getattr(torch, given.dtype)
    inputs = {key: value.to(given.device) for key, value in example_inputs(given, model).items()}
    model.to(given.device)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 1.0
            module.train()
    with torch.no_grad():
        model(**inputs)
        model.eval().to(dtype)
        inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
        weights = {key: value.cpu() for key, value in model.state_dict().items()}
        wide = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
        result = model.double()(**wide)
    held = {"weights": weights, "inputs": {k: v.cpu() for k, v in inputs.items()}, "result": result.cpu()}
    torch.save(held, given.reference)


def worker(given: argparse.Namespace) -> None:
    import torch

    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True
    held = torch.load(given.reference)
    model = build(given)
    model.to(getattr(torch, given.dtype)).load_state_dict(held["weights"])
    cuda = given.device.startswith("cuda")
    started = time.perf_counter()
    before = used_bytes(cuda)
    row: dict[str, Any] = {"model": given.model, "row": given.worker}
    with torch.no_grad():
        if given.worker == "onnxruntime":
            call = onnxruntime_call(given, model, held["inputs"], row)
        else:
            inputs = {key: value.to(given.device) for key, value in held["inputs"].items()}
            if given.cold_seconds:
                wait_for_turn()
            call = prepare(given, model.to(given.device), inputs)
        for _ in range(3):
            call()
        row["first_call_seconds"] = given.cold_seconds or time.perf_counter() - started
        release(cuda)
        if not given.cold_seconds:
            wait_for_turn(row["first_call_seconds"])
        warm_until = time.perf_counter() + (0.0 if given.tiny else 0.5)  # an idle device runs at a lower clock
        for _ in range(5):
            call()
        while time.perf_counter() < warm_until:
            call()
        release(cuda)
        seconds: list[float] = []
        while len(seconds) < given.repeats:
            began = time.perf_counter()
            call()
            if cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        row["seconds"], row["fastest_seconds"] = statistics.median(seconds), min(seconds)
        if given.worker == "onnxruntime":
            row["reserved_bytes"] = used_bytes(cuda) - before
        elif cuda:
            row["reserved_bytes"], row["allocated_bytes"] = (
                torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated(),
            )  # fmt: skip
        found = call().double().cpu()
        if cuda and given.worker != "onnxruntime":
            row["segments"] = segments()
        if given.kernels and given.worker.startswith(PROFILED):
            row["kernels"] = kernels(call, given.kernels)
            row["kernel_seconds"] = row["kernels"][0][2]
    reference = held["result"]
    row["error"] = float((found - reference).abs().max() / reference.abs().max())
    compiled = getattr(call, "compiled", None)
    if compiled is not None:
        row["notes"] = list(compiled.report.notes)
    print("ROW " + json.dumps(row), flush=True)
    sys.stdin.readline()  # the parent looks at the device first


def wait_for_turn(seconds: float = 0.0) -> None:
    """Say that the row is ready, and how long that took, and wait until nothing else uses the device."""
    print(f"READY {seconds}", flush=True)
    sys.stdin.readline()


def segments() -> list[dict[str, Any]]:
    """What torch's allocator reserves, by pool: bytes of all its segments, and of the blocks in use between calls."""
    import torch

    found: dict[str, dict[str, Any]] = {}
    for segment in torch.cuda.memory_snapshot():
        pool = "of a CUDA graph" if tuple(segment["segment_pool_id"]) != (0, 0) else "common"
        name = f"{pool}, {segment['segment_type']}"
        entry = found.setdefault(name, {"pool": name, "reserved_bytes": 0, "used_bytes": 0, "largest_unused_bytes": 0})
        entry["reserved_bytes"] += segment["total_size"]
        entry["used_bytes"] += segment["allocated_size"]
        unused = [block["size"] for block in segment["blocks"] if block["state"] == "inactive"]
        entry["largest_unused_bytes"] = max([entry["largest_unused_bytes"], *unused])
    return list(found.values())


def kernels(call: Callable[[], Any], count: int) -> list[list[Any]]:
    """The kernels of a call that take most time: name, how often, seconds in all."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    taken = [
        event
        for event in trace.key_averages()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]
    taken.sort(key=lambda event: -event.self_device_time_total)
    total = ["all", sum(event.count for event in taken), sum(event.self_device_time_total for event in taken) / 1e6]
    return [total, *([event.key[:110], event.count, event.self_device_time_total / 1e6] for event in taken[:count])]


def prepare(given: argparse.Namespace, model: Any, inputs: dict[str, Any]) -> Callable[[], Any]:
    import torch

    import memopt

    kind, _, setting = given.worker.partition(":")
    if kind in ("memopt", "memopt-freeze"):
        torch.backends.cudnn.benchmark = setting == "tune"
        compiled = memopt.compile(model, allow=("freeze",) if kind == "memopt-freeze" else ())

        def call() -> Any:
            return compiled(**inputs)

        call.compiled = compiled  # type: ignore[attr-defined]
        return call
    if given.model in CONVOLUTIONAL:
        model.to(memory_format=torch.channels_last)
    if kind == "freezing":
        torch._inductor.config.freezing = True
    modes = {"compile": "default", "reduce-overhead": "reduce-overhead", "freezing": "reduce-overhead"}
    run = model if kind == "eager" else torch.compile(model, mode=modes[kind])

    def marked() -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return run(**inputs)

    return marked


def onnxruntime_call(
    given: argparse.Namespace, model: Any, inputs: dict[str, Any], row: dict[str, Any]
) -> Callable[[], Any]:
    """A session on CUDA, replaying its CUDA graph where it can make one, with inputs and outputs on the device."""
    import onnxruntime  # type: ignore[import-untyped]
    import torch

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.onnx")
        names = list(inputs)
        torch.onnx.export(model, kwargs=inputs, f=path, dynamo=True, input_names=names, output_names=["out"])
        if not given.device.startswith("cuda"):
            session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
            feed = {
                entry.name: value.numpy() for entry, value in zip(session.get_inputs(), inputs.values(), strict=True)
            }
            return lambda: torch.from_numpy(session.run(None, feed)[0])
        if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
            raise RuntimeError("onnxruntime-gpu is not installed")
        onnxruntime.preload_dlls()
        options = {"arena_extend_strategy": "kSameAsRequested", "cudnn_conv_algo_search": "EXHAUSTIVE"}
        for extra in ({"enable_cuda_graph": "1"}, {}):
            try:
                provider = ("CUDAExecutionProvider", {**options, **extra})
                session = onnxruntime.InferenceSession(path, providers=[provider, "CPUExecutionProvider"])
                call = bound_call(session, inputs)
                call()
                row["cuda_graph"] = bool(extra)
                return call
            except Exception as error:  # its exceptions share no base class; without a graph is the second attempt
                row["without_graph"] = str(error).splitlines()[0][:200]
    raise RuntimeError(row["without_graph"])


def bound_call(session: Any, inputs: dict[str, Any]) -> Callable[[], Any]:
    import onnxruntime
    import torch

    if "CUDAExecutionProvider" not in session.get_providers():
        raise RuntimeError("onnxruntime did not load its CUDA provider")
    binding = session.io_binding()
    held = []
    for entry, value in zip(session.get_inputs(), inputs.values(), strict=True):
        held.append(onnxruntime.OrtValue.ortvalue_from_numpy(value.numpy(), "cuda", 0))
        binding.bind_ortvalue_input(entry.name, held[-1])
    shape = session.get_outputs()[0].shape
    kinds = {"tensor(float16)": "float16", "tensor(float)": "float32"}
    import numpy

    empty = numpy.zeros(shape, kinds[session.get_outputs()[0].type])
    result = onnxruntime.OrtValue.ortvalue_from_numpy(empty, "cuda", 0)
    binding.bind_ortvalue_output(session.get_outputs()[0].name, result)

    class Call:
        def __call__(self) -> Any:
            session.run_with_iobinding(binding)
            return self

        def double(self) -> Any:
            return torch.from_numpy(result.numpy()).double()

    held.append(result)
    return Call()


def release(cuda: bool) -> None:
    import gc

    import torch

    gc.collect()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
