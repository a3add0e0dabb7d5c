"""What a cost depends on: the operator with its operands, and the machine with its settings."""

from __future__ import annotations

import functools
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx

from memopt.graph import fake_calls
from memopt.torch_compat import pytree

_FACT = "key of its cost"


def key_of(node: fx.Node) -> str:
    """What the cost of a call node depends on, as text that is the same in every process.

    Operator; shapes, strides, dtypes and kinds of device of the operands; which of them are the same; all other
    arguments. Nodes with equal keys that run on the same device have equal costs.
    """
    call = fake_calls.behind(node)
    if call is None:
        return _written(node)
    if _FACT not in call.facts:
        call.facts[_FACT] = _written(node)
    key: str = call.facts[_FACT]
    return key


def _written(node: fx.Node) -> str:
    seen: dict[fx.Node, int] = {}

    def freeze(value: Any) -> Any:
        if isinstance(value, fx.Node):
            number = seen.setdefault(value, len(seen))
            leaves = pytree.tree_leaves(value.meta.get("val"))
            return number, tuple(_layout(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves)
        if isinstance(value, (list, tuple)):
            return tuple(map(freeze, value))
        if isinstance(value, Mapping):
            return tuple((key, freeze(item)) for key, item in value.items())
        if isinstance(value, torch.device):
            return "device", value.type
        return type(value).__name__, repr(value)

    return repr((str(node.target), freeze(node.args), freeze(node.kwargs)))


def _layout(tensor: torch.Tensor) -> Any:
    if tensor.layout is not torch.strided:
        return str(tensor.layout), tuple(tensor.shape), str(tensor.dtype), tensor.device.type
    return tuple(tensor.shape), tensor.stride(), str(tensor.dtype), tensor.device.type


def place_of(device: torch.device) -> str:
    """What costs on this machine depend on besides the operator: device, versions, threads, numeric settings.

    Args:
        device: "cpu" or a CUDA device of this machine.
    """
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "source": torch.version.git_version,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "processors": properties.multi_processor_count,
            "memory": properties.total_memory,
            "toolkit": torch.version.cuda or torch.version.hip,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
            "settings": [
                torch.backends.cuda.matmul.fp32_precision,
                torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
                torch.backends.cudnn.enabled,
                torch.backends.cudnn.benchmark,
                torch.backends.cudnn.deterministic,
                str(torch.backends.cuda.preferred_blas_library()),
                os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""),
            ],
        }
    else:
        facts |= {
            "device": processor_name(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "settings": [
                torch.backends.mkldnn.matmul.fp32_precision,  # type: ignore[attr-defined]
                torch.backends.mkldnn.conv.fp32_precision,  # type: ignore[attr-defined]
                torch.backends.mkldnn.enabled,
            ],
        }
    return json.dumps(facts, sort_keys=True)


@functools.cache
def processor_name() -> str:
    """The processor's name, as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    return platform.processor() or platform.machine()
