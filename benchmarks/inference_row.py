"""The process of one row of inference.py: a model on one engine, compiled, timed, and compared with float64."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memopt
from memopt.comparison.inside import Seat, serve
from memopt.comparison.job import Job
from memopt.comparison.processes import device_used
from memopt.comparison.worker import release, report_of
from memopt.models.bert import Encoder

CONVOLUTIONAL = ("resnet50", "densenet121", "unet")
PROFILED = ("memopt", "freezing")
SMALL_BERT = {"layers": 2, "width": 32, "heads": 4, "hidden": 64, "vocabulary": 128, "positions": 32}


def build(name: str, tiny: bool) -> nn.Module:
    """The model with random weights: for BERT the encoder, whose hidden states are the result."""
    if name != "bert_base":
        return memopt.models.build(name, tiny=tiny).eval()
    return Encoder(pooler=False, **(SMALL_BERT if tiny else {})).eval()


def fresh(name: str, tiny: bool, sizes: dict[str, int]) -> tuple[nn.Module, Any]:
    """The model and its inputs, both random."""
    model = build(name, tiny)
    torch.manual_seed(1)
    if name == "bert_base":
        return model, {"input_ids": torch.randint(128, (sizes["batch"], sizes.get("sequence", 16)))}
    return model, model.example_inputs(**sizes)  # type: ignore[operator]


def made(name: str, tiny: bool, dtype: str, reference: str) -> tuple[nn.Module, Any]:
    """The model with the reference's weights, and its inputs, once they are there."""
    model = build(name, tiny).to(getattr(torch, dtype))
    while not Path(reference).exists():
        time.sleep(0.1)
    held = loaded(reference)
    model.load_state_dict(held["weights"])
    return model, held["inputs"]


def loaded(reference: str) -> Any:
    """Weights, inputs and results, read when they are used."""
    if not Path(reference).stat().st_size:
        raise RuntimeError("there are no results to compare with")
    return torch.load(reference, mmap=True)


def write_reference(job: Job) -> None:
    """Write weights, with batch norms that have seen the inputs, the inputs, and the results in float64."""
    model, inputs = job.source.load()
    dtype = getattr(torch, job.dtype)
    inputs = {key: value.to(job.device) for key, value in inputs.items()}
    model.to(job.device)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
            module.train()
    model(**inputs)
    model.eval().to(dtype)
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    weights = {key: value.cpu() for key, value in model.state_dict().items()}
    wide = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    result = model.double()(**wide)
    held = {"weights": weights, "inputs": {k: v.cpu() for k, v in inputs.items()}, "result": result.cpu()}
    path = Path(job.more["reference"])
    torch.save(held, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)


def work(job: Job, seat: Seat) -> dict[str, Any]:
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True
    with torch.no_grad():
        if job.engine == "reference":
            write_reference(job)
            return {}
        model, inputs = job.source.load()
        return (foreign_row if job.engine == "onnxruntime" else row)(job, seat, model, inputs)


def row(job: Job, seat: Seat, model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """What runs in torch's memory."""
    cuda = job.device.startswith("cuda")
    began = seat.now()
    inputs = {key: value.to(job.device) for key, value in inputs.items()}
    run, call = prepare(job, model.to(job.device), inputs)
    for _ in range(3):
        call()
    found: dict[str, Any] = {"first_call_seconds": seat.now() - began}
    found["error"] = error_of(call(), job)
    release(cuda)
    seat.say("ready", device=job.device if cuda else "")
    found.update(timed(job, call))
    if cuda:
        found["reserved_bytes"] = torch.cuda.max_memory_reserved()
        found["allocated_bytes"] = torch.cuda.max_memory_allocated()
        found["segments"] = segments(job.more["blocks"])
    if job.more["kernels"] and job.engine.startswith(PROFILED):
        found["kernels"] = kernels(call, job.more["kernels"])
        found["kernel_seconds"] = found["kernels"][0][2]
    report = report_of(run)
    if report is not None:
        found.update(notes=list(report.notes), phases=dict(report.seconds), backend=report.backend)
        found.update(budget_bytes=report.budget_bytes, predicted_bytes=report.peak_bytes)
    return found


def foreign_row(job: Job, seat: Seat, model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """ONNX Runtime: exported beside others; its session, which times kernels, is made when nothing else runs."""
    device = job.device if job.device.startswith("cuda") else ""
    found: dict[str, Any] = {}
    began = seat.now()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.onnx")
        torch.onnx.export(model, kwargs=inputs, f=path, dynamo=True, input_names=list(inputs), output_names=["out"])
        del model
        exported = seat.now() - began
        seat.say("ready", device=device)
        before, began = device_used(device), seat.now()
        call = onnxruntime_call(path, job, inputs, found)
        for _ in range(3):
            call()
        found["first_call_seconds"] = exported + seat.now() - began
        found.update(timed(job, call))
        after = device_used(device)
        if before is not None and after is not None:
            found["reserved_bytes"] = after - before
        found["error"] = error_of(call(), job)
    return found


def timed(job: Job, call: Callable[[], Any]) -> dict[str, Any]:
    """The median of calls in seconds, the device waited for, and the least."""
    cuda = job.device.startswith("cuda")
    warm_until = time.perf_counter() + (0.0 if job.more["tiny"] else 0.3)  # an idle device runs at a lower clock
    for _ in range(5):
        call()
    while time.perf_counter() < warm_until:
        call()
    release(cuda)
    seconds: list[float] = []
    while len(seconds) < job.repeats:
        began = time.perf_counter()
        call()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return {"seconds": statistics.median(seconds), "fastest_seconds": min(seconds)}


def error_of(found: Any, job: Job) -> float:
    """The largest difference from the results in float64, as a share of their largest value."""
    expected = loaded(job.more["reference"])["result"]
    found = found.cpu()
    pairs = list(zip(found.split(1), expected.split(1), strict=True))  # by sample: all of GPT-2's are a gigabyte
    largest = max(float(wide.abs().max()) for _, wide in pairs)
    return max(float((value.double() - wide).abs().max()) for value, wide in pairs) / largest


def segments(with_blocks: bool) -> list[dict[str, Any]]:
    """What torch's allocator reserves, by pool: bytes of all its segments, and of the blocks in use between calls.

    With blocks of at least 1 MiB in the order of their addresses: in MiB, negative where unused.
    """
    found: dict[str, dict[str, Any]] = {}
    for segment in torch.cuda.memory_snapshot():
        pool = "of a CUDA graph" if tuple(segment["segment_pool_id"]) != (0, 0) else "common"
        name = f"{pool}, {segment['segment_type']}"
        entry = found.setdefault(name, {"pool": name, "reserved_bytes": 0, "used_bytes": 0, "largest_unused_bytes": 0})
        entry["reserved_bytes"] += segment["total_size"]
        entry["used_bytes"] += segment["allocated_size"]
        unused = [block["size"] for block in segment["blocks"] if block["state"] == "inactive"]
        entry["largest_unused_bytes"] = max([entry["largest_unused_bytes"], *unused])
        if with_blocks:
            blocks = [(block["size"] / 2**20, block["state"]) for block in segment["blocks"]]
            shown = [round(size if state == "active_allocated" else -size, 2) for size, state in blocks if size >= 1]
            entry.setdefault("blocks", []).append([segment["total_size"] / 2**20, shown])
    return list(found.values())


def kernels(call: Callable[[], Any], count: int) -> list[list[Any]]:
    """The kernels of a call that take most time: name, how often, seconds in all."""
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


def prepare(job: Job, model: nn.Module, inputs: dict[str, Any]) -> tuple[Any, Callable[[], Any]]:
    """What runs the model, and a call of it."""
    name, _, budget = job.engine.partition(":")
    kind, _, backend = name.partition("/")
    if kind in ("memopt", "memopt-freeze"):
        torch.backends.cudnn.benchmark = False
        allow = ("freeze",) if kind == "memopt-freeze" else ()
        compiled = memopt.compile(model, budget or None, allow=allow, backend=backend or None)
        return compiled, lambda: compiled(**inputs)
    if job.more["model"] in CONVOLUTIONAL:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if kind == "freezing":
        torch._inductor.config.freezing = True
    modes = {"compile": "default", "reduce-overhead": "reduce-overhead", "freezing": "reduce-overhead"}
    run: Any = model if kind == "eager" else torch.compile(model, mode=modes[kind])

    def marked() -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return run(**inputs)

    return run, marked


def onnxruntime_call(path: str, job: Job, inputs: dict[str, Any], row: dict[str, Any]) -> Callable[[], Any]:
    """A session on CUDA, replaying its CUDA graph where it can make one, with inputs and outputs on the device."""
    import onnxruntime  # type: ignore[import-untyped]

    if not job.device.startswith("cuda"):
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        feed = {entry.name: value.numpy() for entry, value in zip(session.get_inputs(), inputs.values(), strict=True)}
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
    import numpy
    import onnxruntime

    if "CUDAExecutionProvider" not in session.get_providers():
        raise RuntimeError("onnxruntime did not load its CUDA provider")
    binding = session.io_binding()
    held = []
    for entry, value in zip(session.get_inputs(), inputs.values(), strict=True):
        held.append(onnxruntime.OrtValue.ortvalue_from_numpy(value.numpy(), "cuda", 0))
        binding.bind_ortvalue_input(entry.name, held[-1])
    shape = session.get_outputs()[0].shape
    kinds = {"tensor(float16)": "float16", "tensor(float)": "float32"}
    empty = numpy.zeros(shape, kinds[session.get_outputs()[0].type])
    result = onnxruntime.OrtValue.ortvalue_from_numpy(empty, "cuda", 0)
    binding.bind_ortvalue_output(session.get_outputs()[0].name, result)

    class Call:
        def __call__(self) -> Any:
            session.run_with_iobinding(binding)
            return self

        def cpu(self) -> Any:
            return torch.from_numpy(result.numpy())

    held.append(result)
    return Call()


if __name__ == "__main__":
    serve(sys.argv[1], work)
