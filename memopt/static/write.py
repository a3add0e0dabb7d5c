"""What it takes to write an operator's results into given memory: the call, its placeholders, and what was measured."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx

from memopt.passes.plan_buffers import Form
from memopt.program import tensors_of
from memopt.torch_compat.operators import OpOverload, schema_of

TABLE = Path(__file__).with_name("table.json")

LAYOUT = ("dtype", "layout", "device", "pin_memory", "memory_format")
"""Arguments of functional operators that say how to make the result: out= overloads have none of them."""


class Place(enum.Enum):
    """What stands among a call's arguments for memory that is known when the plan is bound."""

    OUTS = "outs"  # all results, as a tuple
    SCRATCH = "scratch"  # a flat tensor of the first result's dtype, or None


@dataclasses.dataclass(frozen=True)
class Out:
    """Stands among a call's arguments for one result."""

    index: int = 0


@dataclasses.dataclass(frozen=True)
class Write:
    """A call that writes a node's results into given memory.

    Attributes:
        function: what is called.
        args, kwargs: its arguments: nodes of the graph, `Out`s, `Place`s, and constants.
        form: what it asks of its memory.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    form: Form = dataclasses.field(default_factory=Form)


class Unfit(Exception):
    """A recipe does not cover these operands."""


@functools.cache
def out_overload(target: OpOverload) -> OpOverload | None:
    """The overload that computes the same with out= arguments at its end; None when there is none."""
    packet = getattr(getattr(torch.ops, target.namespace), schema_of(target).name.split("::")[1])
    if any(str(result.type) != "Tensor" for result in schema_of(target).returns):
        return None
    ours = [(a.name, str(a.type)) for a in schema_of(target).arguments if a.name not in LAYOUT]
    for name in packet.overloads():
        overload: OpOverload = getattr(packet, name)
        arguments = schema_of(overload).arguments
        outs = [a for a in arguments if a.is_out]
        theirs = [(a.name, str(a.type)) for a in arguments if not a.is_out and a.name not in LAYOUT]
        if outs and len(outs) == len(schema_of(target).returns) and theirs == ours:
            return overload
    return None


@functools.cache
def table() -> Mapping[str, Mapping[str, Any]]:
    """What was measured, by out= overload: its kind, and whether it works on slices without copies."""
    found: dict[str, Any] = json.loads(TABLE.read_text())
    return found["overloads"]  # type: ignore[no-any-return]


def is_true_out(overload: OpOverload) -> bool:
    """Whether the overload was measured to write where it is told; a generated one computes elsewhere and copies."""
    return table().get(str(overload), {}).get("kind") in ("true", "workspace")


def number(value: float, node: fx.Node) -> torch.Tensor:
    """A 0-dim tensor that acts in the node's operator as the Python number does."""
    return number_like(value, next((t for n in node.all_input_nodes for t in tensors_of(n)), tensors_of(node)[0]))


def number_like(value: float, operand: torch.Tensor) -> torch.Tensor:
    """A 0-dim tensor that acts beside the operand as the Python number does."""
    dtype = operand.dtype
    if isinstance(value, float) and not dtype.is_floating_point and not dtype.is_complex:
        dtype = torch.get_default_dtype()
    elif dtype is torch.bool and not isinstance(value, bool):
        dtype = torch.int64
    elif dtype in (torch.float16, torch.bfloat16) and float(torch.tensor(value, dtype=dtype)) != value:
        dtype = torch.float32  # kernels compute with the number as it is
    return torch.tensor(value, dtype=dtype, device=operand.device)
