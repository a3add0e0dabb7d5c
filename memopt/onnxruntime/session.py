"""One ONNX Runtime session: its provider and memory options, and tensors bound to it by address."""

from __future__ import annotations

import atexit
import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from memopt.onnxruntime.memory import TorchAllocator

# Smaller constants are ONNX Runtime's own: shapes and axes have to be known when it loads the graph.
_BOUND_BYTES = 1 << 12
_CUDA, _CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


@dataclasses.dataclass(frozen=True)
class Settings:
    """How sessions are made.

    Attributes:
        device: where inputs and outputs are.
        tight: whether memory counts more than time: no arena, no plan of whole runs, no large workspaces, PyTorch's own
            allocator on CUDA. Else on CUDA the kernels are recorded as one CUDA graph, where all of them run there.
        limit: bytes that ONNX Runtime may allocate on a CUDA device; None for no limit.
    """

    device: torch.device
    tight: bool = False
    limit: int | None = None


def check_provider(device: torch.device) -> None:
    """Raise ValueError, one line that says what to install, where ONNX Runtime has no provider for the device."""
    import onnxruntime  # type: ignore[import-untyped]

    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"backend 'onnxruntime' runs on cpu and cuda, not on {device.type}")
    if device.type == "cuda" and _CUDA not in onnxruntime.get_available_providers():
        raise ValueError("backend 'onnxruntime' on CUDA needs onnxruntime-gpu: pip install onnxruntime-gpu")


def cuda_options(settings: Settings, stream: int | None, *, graph: bool) -> dict[str, str]:
    """The CUDA provider's options, as strings.

    TF32 is used where PyTorch would use it for products and for convolutions alike. With a budget convolution kernels
    are chosen by rule and not by trying all of them, since trying takes the largest workspace of any.

    Args:
        settings: device and memory.
        stream: the stream to work on; None: the default stream, which ONNX Runtime takes beside an allocator of others.
        graph: whether runs are recorded as a CUDA graph.
    """
    tf32 = torch.backends.cudnn.allow_tf32 and torch.get_float32_matmul_precision() != "highest"
    options = {
        "device_id": str(settings.device.index or 0),
        "arena_extend_strategy": "kSameAsRequested",
        "use_tf32": str(int(tf32)),
        "enable_cuda_graph": str(int(graph)),
    }
    if stream is not None:
        options |= {"has_user_compute_stream": "1", "user_compute_stream": str(stream)}
    if settings.tight:
        options |= {"cudnn_conv_algo_search": "HEURISTIC", "cudnn_conv_use_max_workspace": "0"}
    if settings.limit is not None:
        options["gpu_mem_limit"] = str(settings.limit)
    return options


class Session:
    """A graph that was loaded; `run` takes and returns tensors on its device, without copies to or from the host.

    Args:
        model: the graph, an `onnx_ir.Model`.
        results: what each output looks like: shape, dtype, device.
        settings: device and memory.

    Attributes:
        inputs: the names of the graph's inputs, in order, but for constants that are bound once. Those that no node
            reads are not bound: ONNX Runtime would have them on the host.
        graph: whether runs are recorded as one CUDA graph.
        held_bytes: what the session keeps of constants, between runs too.

    Raises:
        RuntimeError: ONNX Runtime refuses the graph, or its CUDA provider does not load; one line.
    """

    def __init__(self, model: Any, results: Sequence[torch.Tensor], settings: Settings) -> None:
        self._settings, self._results = settings, results
        self.inputs = [str(value.name) for value in model.graph.inputs]
        self._bindable = _without_unread(model)
        self._bound = _take_out(model) if settings.tight else {}
        self._allocator: TorchAllocator | None = None
        self._stream: torch.cuda.Stream | None = None
        self._static: tuple[list[torch.Tensor], list[torch.Tensor], Any] | None = None
        if settings.device.type == "cuda":
            if settings.tight:  # beside an allocator of others ONNX Runtime works on the default stream
                self._stream = torch.cuda.default_stream(settings.device)
                self._allocator = TorchAllocator(settings.device, self._stream)
            else:
                self._stream = _new_stream(settings.device)
        self.graph = settings.device.type == "cuda" and not settings.tight
        before = _allocated(settings.device)
        try:
            self._session = self._load(model)
        except RuntimeError:
            if not self.graph:
                raise
            self.graph = False  # part of the graph runs on the host
            self._session = self._load(model)
        constants = (value.const_value for value in model.graph.initializers.values())
        own = sum(value.nbytes for value in constants if value is not None)
        self.held_bytes = own if self._allocator is None else _allocated(settings.device) - before
        self._outputs = [entry.name for entry in self._session.get_outputs()]
        _open.add(self)

    def run(self, users: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run on tensors in the order of `inputs`; the results' memory is new.

        Raises:
            torch.OutOfMemoryError: PyTorch's allocator has no memory left.
            RuntimeError: ONNX Runtime stops.
        """
        if self._stream is None:
            return self._run_bound(users)
        if self.graph:
            try:
                return self._replay(users)
            except RuntimeError:
                if self._static is not None:
                    raise
                # It could not be recorded: some kernel allocates, or waits for the device.
                self.graph, self._stream = False, _new_stream(self._settings.device)
                self._session = self._load(self._model)
        current = torch.cuda.current_stream(self._settings.device)
        if self._settings.tight:
            current.synchronize()  # ONNX Runtime's is the default stream, and a run ends when its work is done
            return self._run_bound(users)
        # ONNX Runtime only queues its work: the streams wait for one another, the host for neither.
        kept = [value.detach().contiguous() for value in users]
        self._stream.wait_stream(current)
        made = self._run_bound(kept)
        current.wait_stream(self._stream)
        return made

    def close(self) -> None:
        """Give everything back: the session must be gone before the functions that free its memory."""
        self._session = self._static = None

    def _load(self, model: Any) -> Any:
        import onnxruntime

        from memopt.onnx.engines import short_line, with_weights_beside

        options, tight = onnxruntime.SessionOptions(), self._settings.tight
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 4
        options.enable_cpu_mem_arena = not tight  # an arena keeps what a run took
        # Without the pattern of a whole run each tensor is freed after its last use; while a CUDA graph is recorded
        # nothing may be allocated, so both runs before it must allocate the same.
        options.enable_mem_pattern = not tight and not self.graph
        options.enable_mem_reuse = True
        providers: list[Any] = [_CPU]
        if self._stream is not None:
            cuda = cuda_options(self._settings, None if tight else self._stream.cuda_stream, graph=self.graph)
            providers.insert(0, (_CUDA, cuda | (self._allocator.options() if self._allocator else {})))
        proto, weights = with_weights_beside(model)
        if weights:
            options.add_external_initializers(list(weights), list(weights.values()))
        self._model = model if self.graph else None  # it may have to be loaded again
        try:
            session = onnxruntime.InferenceSession(
                proto.SerializeToString(), options, providers=providers, enable_fallback=0
            )
        except Exception as error:  # its exceptions share no base class
            self._raise_own_error()
            raise RuntimeError(f"ONNX Runtime refuses the graph: {short_line(error)}") from error
        if self._stream is not None and _CUDA not in session.get_providers():
            raise RuntimeError(
                "ONNX Runtime's CUDA provider does not load: install an onnxruntime-gpu that was built for CUDA "
                f"{torch.version.cuda}, as PyTorch here was, and cuDNN 9"
            )
        self._host = frozenset() if self._stream is None else _on_host(session)
        self._bound = {name: self._placed(name, value) for name, value in self._bound.items()}
        return session

    def _raise_own_error(self) -> None:
        if self._allocator is not None and self._allocator.error is not None:
            error, self._allocator.error = self._allocator.error, None
            raise error

    def _run_bound(self, users: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        # What is bound must outlive the run.
        kept = [
            self._placed(name, value.detach().contiguous())
            for name, value in zip(self._bindable, self._read(users), strict=True)
        ]
        made = [
            torch.empty(value.shape, dtype=value.dtype, device="cpu" if name in self._host else value.device)
            for name, value in zip(self._outputs, self._results, strict=True)
        ]
        self._start(self._binding(kept, made))
        return [value.to(self._settings.device) for value in made]

    def _read(self, users: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of the tensors for all inputs those that a node reads."""
        read = set(self._bindable)
        return [value for name, value in zip(self.inputs, users, strict=True) if name in read]

    def _placed(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """The value where the nodes that read it run."""
        return value.cpu() if name in self._host else value

    def _binding(self, users: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> Any:
        binding = self._session.io_binding()
        for name, value in (*zip(self._bindable, users, strict=True), *self._bound.items()):
            binding.bind_input(name, *_where(value))
        for name, value in zip(self._outputs, made, strict=True):
            binding.bind_output(name, *_where(value))
        return binding

    def _start(self, binding: Any, *, graph: int = 0) -> None:
        import onnxruntime

        from memopt.onnx.engines import short_line

        options = onnxruntime.RunOptions()
        if self._stream is not None and not self._settings.tight:
            options.add_run_config_entry("disable_synchronize_execution_providers", "1")
            if self.graph:
                options.add_run_config_entry("gpu_graph_id", str(graph))
        try:
            self._session.run_with_iobinding(binding, options)
        except Exception as error:
            self._raise_own_error()
            raise RuntimeError(f"ONNX Runtime stops: {short_line(error)}") from error

    def _replay(self, users: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run as a CUDA graph, which reads and writes the same addresses each time: inputs and results are copied."""
        assert self._stream is not None
        current = torch.cuda.current_stream(self._settings.device)
        if self._static is None:
            given = [value.detach().contiguous().clone() for value in self._read(users)]
            made = [torch.empty(value.shape, dtype=value.dtype, device=value.device) for value in self._results]
            binding = self._binding(given, made)
            self._stream.wait_stream(current)
            for _ in range(2):  # kernels that are new allocate; while a graph is recorded none may
                self._start(binding, graph=-1)
            self._start(binding)
            self._stream.synchronize()
            self._static, self._model = (given, made, binding), None
        given, made, binding = self._static
        for buffer, value in zip(given, self._read(users), strict=True):
            buffer.copy_(value)
        self._stream.wait_stream(current)
        self._start(binding)
        current.wait_stream(self._stream)
        return [value.clone() for value in made]


_open: weakref.WeakSet[Session] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Sessions call back into Python to free memory: they must go while there is a Python."""
    for session in list(_open):
        session.close()


def _on_host(session: Any) -> frozenset[str]:
    """The inputs and outputs that nodes on the host read and make: what is bound to another device is not copied."""
    places = (
        *zip(session.get_inputs(), session.get_input_memory_infos(), strict=True),
        *zip(session.get_outputs(), session.get_output_memory_infos(), strict=True),
    )
    return frozenset(entry.name for entry, place in places if place.name == "Cpu")


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _without_unread(model: Any) -> tuple[str, ...]:
    """Take inputs that no node reads out of the graph, in place; return the names of the others."""
    unread = [value for value in model.graph.inputs if not value.uses() and not value.is_graph_output()]
    for value in unread:
        model.graph.inputs.remove(value)
    return tuple(str(value.name) for value in model.graph.inputs)


def _take_out(model: Any) -> Mapping[str, torch.Tensor]:
    """Turn initializers that are PyTorch's tensors into inputs of the graph, in place, so that each exists once."""
    found: dict[str, torch.Tensor] = {}
    graph = model.graph
    for value in list(graph.initializers.values()):
        raw = getattr(value.const_value, "raw", None)
        if isinstance(raw, torch.Tensor) and raw.nbytes >= _BOUND_BYTES and raw.is_contiguous():
            graph.initializers.pop(str(value.name))
            value.const_value = None
            graph.inputs.append(value)
            found[str(value.name)] = raw.detach()
    return found


def _where(value: torch.Tensor) -> tuple[str, int, int, tuple[int, ...], int]:
    """Device, its number, ONNX's type, shape and address."""
    from onnx_ir.tensor_adapters import from_torch_dtype

    kind = int(from_torch_dtype(value.dtype))
    return value.device.type, value.device.index or 0, kind, tuple(value.shape), value.data_ptr()
