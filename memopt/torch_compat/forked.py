"""A copy of this process that generates code: what it may not ask of a GPU, and where it can begin.

A copy of a process cannot call CUDA. Generating code asks it for nothing but what its devices are, and what its
libraries would do: torch has no setting that answers instead. Tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import torch
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.codecache import CacheBase
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import IRNode
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses import fake_tensor
from torch.utils._triton import has_triton, triton_hash_with_backend

from memopt.torch_compat.patched import replaced
from memopt.torch_compat.unguarded_calls import call_operators_alone

# What fake convolutions ask the libraries of a GPU.
_ASKED = ("_select_conv_backend", "_conv_determine_backend_memory_format")


@contextlib.contextmanager
def libraries_asked_through(around: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Within: what fake convolutions ask the libraries of a GPU is asked through what `around` makes of the function.

    Args:
        around: takes the function's name and the function.
    """
    with contextlib.ExitStack() as stack:
        for name in _ASKED:
            stack.enter_context(replaced(torch._C, name, around(name, getattr(torch._C, name))))
        yield


@contextlib.contextmanager
def before_code(begin: Callable[[bool, Any], None]) -> Iterator[None]:
    """Within: as a graph's values are laid out and scheduled, and its code is to be loaded, something is called.

    Args:
        begin: takes whether the graph is backward, and the graph, of which `result_strides` can be asked.
    """
    plain = GraphLowering.compile_to_module

    def compile_to_module(graph: GraphLowering) -> Any:
        begin(bool(graph.is_backward), graph)
        return plain(graph)

    with replaced(GraphLowering, "compile_to_module", compile_to_module):
        yield


def result_strides(graph: Any) -> list[tuple[int, ...] | None]:
    """The strides of each result of a graph that is lowered; None for what is no tensor."""
    results: Any = graph.graph_outputs or []
    tensors = [out if isinstance(out, IRNode) and out.has_tensor_output() else None for out in results]
    return [None if out is None else tuple(map(int, out.get_stride())) for out in tensors]


def known_beforehand(devices: Set[torch.device]) -> dict[int, Any]:
    """What Inductor asks of these devices and remembers, asked here; properties of the GPUs among them by index."""
    CacheBase.get_system()
    gpus = [device for device in devices if device.type == "cuda"]
    for device in gpus:
        DeviceProperties.create(device)
    if gpus and has_triton():
        triton_hash_with_backend()  # Triton's driver keeps functions of CUDA of its own, and may be there already
    return {device.index: torch.cuda.get_device_properties(device) for device in gpus}


def stand_alone(gpus: Mapping[int, Any]) -> None:
    """Make this process, a copy, do without the GPUs, which belong to the first.

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
    call_operators_alone()
