"""Backward's code, generated in a process of its own while forward's is generated in this one.

Inductor's code generation is Python, one half after the other. A copy of this process goes on where AOTAutograd would
with forward lowered, and ends once backward is: its code lies in Inductor's cache on disk then, where this process
finds it when it comes to backward, by the same key as any other. What the copy does is never trusted: where it fails,
where it lasts too long, or where it lowered another backward, backward is lowered here.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import fx
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import config as inductor_config
from torch._inductor.codecache import CacheBase
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import IRNode
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses import fake_tensor
from torch.utils._triton import has_triton, triton_hash_with_backend

from memopt.cores import cores
from memopt.errors import first_line
from memopt.fake_calls import library_settings
from memopt.inductor.kernel_sources import KernelSources

log = logging.getLogger("memopt")

# Code of fewer nodes is generated before the copy would be worth its start.
_FEW = 80
# A copy is given up when it takes so many times what forward took, and so many seconds.
_PATIENCE, _START = 4.0, 10.0
_LOOK = 0.01  # seconds between two looks at it
# What fake convolutions ask the libraries of a GPU.
_ASKED = ("_select_conv_backend", "_conv_determine_backend_memory_format")


class BegunError(BaseException):
    """Ends what only the first process goes on with; no handler of errors is for it."""

    def __init__(self, strides: list[tuple[int, ...] | None]) -> None:
        """Take the strides of forward's results; None for what is no tensor."""
        super().__init__()
        self.strides = strides


class Ahead:
    """At most one copy of this process, which generates the code of one backward.

    Attributes:
        inside: whether this process is the copy.
    """

    # Whether a copy failed: the next would, too, where it waits for a lock, or makes code that no cache holds.
    _fails = False
    # Of the libraries of a GPU, which a copy cannot ask: what was traced once is not asked for again.
    _answers: ClassVar[dict[Any, Any]] = {}

    def __init__(self) -> None:
        """Nothing is begun yet."""
        self.inside = False
        self._child: int | None = None
        self._began = 0.0
        self._may = False
        self._missed = False
        self._kernels: KernelSources | None = None  # of the copy

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """What may begin a copy: it never leaves this block, and does not outlive it."""
        self._may = True
        try:
            with contextlib.ExitStack() as stack:
                for name in _ASKED:
                    stack.enter_context(patch.object(torch._C, name, self._remembering(name)))
                yield
        except Exception as error:
            if self.inside:
                log.info("backward's code cannot be generated ahead: %s: %s", type(error).__name__, first_line(error))
                log.debug("where that was", exc_info=True)
            raise
        finally:
            self._may = False
            if self.inside:
                os._exit(1)
            self._stop()

    def begin(self, half: fx.GraphModule, inputs: Sequence[Any]) -> bool:
        """Begin a copy where one is worth it; whether this process is the copy.

        Args:
            half: forward, as it is to be lowered.
            inputs: its arguments, fake tensors among them.
        """
        if not self._may or self._missed or Ahead._fails or not _is_worth(half):
            return False
        devices = {value.device for value in inputs if isinstance(value, torch.Tensor)}
        known = _learned(devices)
        self._began = time.monotonic()
        try:
            self._kernels = KernelSources()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python's and JAX's, of threads: what the copy does needs none
                child = os.fork()
        except OSError:  # too many processes, memory that may not be promised twice, or no room for a file
            Ahead._fails = True
            return False
        if child:
            self._child = child
            return False
        self.inside = True
        gc.disable()  # garbage may hold what only the first process can let go of
        _stand_alone(known)
        self._kernels.tell()
        return True

    @contextlib.contextmanager
    def once_laid_out(self, half: fx.GraphModule, inputs: Sequence[Any]) -> Iterator[None]:
        """While forward is lowered in the block, begin a copy as soon as it is known how what forward saves lies.

        Raises:
            BegunError: this process is the copy.
        """
        plain = GraphLowering.compile_to_module

        def compile_to_module(graph: GraphLowering) -> Any:
            if not graph.is_backward and self.begin(half, inputs):
                raise BegunError(_strides(graph))
            return plain(graph)

        with patch.object(GraphLowering, "compile_to_module", compile_to_module):
            yield

    @property
    def running(self) -> bool:
        """Whether a copy was begun, and not waited for."""
        return self._child is not None

    def leave(self) -> None:
        """End this process, the copy, whose work is done."""
        os._exit(0)

    def wait(self) -> bool:
        """Wait until the copy has ended; whether it said that backward's code lies in the cache."""
        if self._child is None:
            return False
        until = time.monotonic() + _START + _PATIENCE * (time.monotonic() - self._began)
        while time.monotonic() < until:
            self.listen()
            try:
                ended, status = os.waitpid(self._child, os.WNOHANG)
            except ChildProcessError:  # someone else waits for every process that ends: what it said is lost
                ended, status = self._child, 0
            if ended:
                self.listen()
                self._child = None
                self._hear_no_more()
                Ahead._fails = status != 0
                return status == 0
            time.sleep(_LOOK)
        Ahead._fails = True
        self._stop()
        return False

    def listen(self) -> None:
        """Have those of the copy's kernels compiled that are there by now."""
        if self._kernels is not None:
            self._kernels.listen()

    def missed(self) -> None:
        """Learn that the copy's code was not found: it was made for another backward."""
        self._missed = True

    def _remembering(self, name: str) -> Callable[..., Any]:
        """A function of torch's, whose answers are remembered: tracing the joint graph asks all that the copy will."""
        plain = getattr(torch._C, name)

        def answer(*args: Any, **options: Any) -> Any:
            asked = name, library_settings(), _frozen(args), _frozen(tuple(options.items()))
            if asked not in self._answers:
                self._answers[asked] = plain(*args, **options)
            return self._answers[asked]

        return answer

    def _stop(self) -> None:
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self._child, signal.SIGKILL)
                os.waitpid(self._child, 0)
            self._child = None
        self._hear_no_more()

    def _hear_no_more(self) -> None:
        if self._kernels is not None:
            self._kernels.close()
            self._kernels = None


def lays_out(half: fx.GraphModule) -> bool:
    """Whether Inductor may lay out values of a graph otherwise than they were traced, for the sake of convolutions."""
    return bool(half.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default))


def _strides(graph: GraphLowering) -> list[tuple[int, ...] | None]:
    results: Any = graph.graph_outputs or []
    tensors = [out if isinstance(out, IRNode) and out.has_tensor_output() else None for out in results]
    return [None if out is None else tuple(map(int, out.get_stride())) for out in tensors]


def _frozen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


def _is_worth(half: fx.GraphModule) -> bool:
    if sys.platform != "linux" or cores() < 2:
        return False
    if inductor_config.compile_threads == 1:  # as who sets TORCHINDUCTOR_COMPILE_THREADS=1 wants a single process
        return False
    if inductor_config.force_disable_caches or not inductor_config.fx_graph_cache:
        return False
    return len(half.graph.nodes) >= _FEW


def _learned(devices: Set[torch.device]) -> dict[int, Any]:
    """What Inductor asks of these devices and remembers, asked here; properties of the GPUs among them by index."""
    CacheBase.get_system()
    gpus = [device for device in devices if device.type == "cuda"]
    for device in gpus:
        DeviceProperties.create(device)
    if gpus and has_triton():
        triton_hash_with_backend()  # Triton's driver keeps functions of CUDA of its own, and may be there already
    return {device.index: torch.cuda.get_device_properties(device) for device in gpus}


def _stand_alone(gpus: Mapping[int, Any]) -> None:
    """Make this process, a copy, do without the GPUs, which belong to the first.

    A copy of a process cannot call CUDA. Generating code asks it for nothing but what its devices are.

    Args:
        gpus: properties by index; empty where there are none.
    """
    if not gpus:
        return
    here: int = next(iter(gpus))

    def properties(device: Any = None) -> Any:
        index = device if isinstance(device, int) else None if device is None else torch.device(device).index
        return gpus[here if index is None else index]

    def stay(*_: Any) -> int:
        return here

    shared = {
        "current_device": stay,
        "_exchange_device": stay,
        "_maybe_exchange_device": stay,
        "set_device": stay,
        "get_device_properties": properties,
    }
    alone: dict[str, Any] = {
        "_lazy_init": stay,
        "is_available": lambda: True,
        "get_rng_state": lambda *_: torch.empty(0, dtype=torch.uint8),
        "set_rng_state": stay,
    }
    for name, stand_in in {**shared, **alone}.items():
        setattr(torch.cuda, name, stand_in)
    for name, stand_in in shared.items():  # it holds functions of torch.cuda by names of its own
        setattr(CudaInterface, name.removeprefix("_"), staticmethod(stand_in))
    fake_tensor.init_gpu_context = lambda *_: None  # type: ignore[assignment]
