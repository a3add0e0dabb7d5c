"""Gradients that the loss has not used: zeros, which backward of a compiled graph takes in their place.

Left to autograd, zeros that were made before memory ran out would never be freed, and before torch 2.13 all of them
would stay until backward has returned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memopt.torch_compat.backward import running_node
from memopt.torch_compat.boxed import boxed
from memopt.torch_compat.storages import span_of

ZEROS = "memopt: zeros"  # in the metadata of autograd's node: what is missing, in order


@dataclasses.dataclass(frozen=True)
class Tangent:
    """A gradient that backward takes.

    Attributes:
        output: the position of the output that it is of, among the results of forward.
        shape, strides: of it.
        dtype: of it, by name, as "float32".
        device: of it, as "cuda:0".
    """

    output: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: str

    @staticmethod
    def of(output: int, value: Any) -> Tangent | None:
        """The gradient of an output by what it is traced with; None where it is no plain tensor of fixed sizes."""
        if type(value).__name__ not in ("Tensor", "FakeTensor") or value.layout is not torch.strided:
            return None
        if not all(isinstance(size, int) for size in (*value.shape, *value.stride())):
            return None
        dtype = str(value.dtype).removeprefix("torch.")
        return Tangent(output, tuple(value.shape), tuple(value.stride()), dtype, str(value.device))

    def listed(self) -> list[Any]:
        """It as a plain list."""
        return [self.output, list(self.shape), list(self.strides), self.dtype, self.device]

    @staticmethod
    def of_list(record: Any) -> Tangent:
        """That of such a list; raises ValueError or TypeError where it is none."""
        output, shape, strides, dtype, device = record
        return Tangent(int(output), tuple(map(int, shape)), tuple(map(int, strides)), str(dtype), str(device))

    def zeros(self) -> torch.Tensor:
        """Zeros in its place."""
        elements = span_of(self.shape, self.strides)
        memory = torch.zeros(elements, dtype=getattr(torch, self.dtype), device=self.device)
        return memory.as_strided(self.shape, self.strides)


def filled(run: Callable[[list[Any]], Sequence[Any]]) -> Callable[[list[Any]], Sequence[Any]]:
    """A compiled backward that is given zeros in place of the arguments that autograd has left out."""

    def backward(args: list[Any]) -> Sequence[Any]:
        node = running_node()  # None where it is called by hand
        # Taken once: where backward runs in pieces, each piece comes through here within the run of the whole.
        missing: Sequence[Tangent] = () if node is None else node.metadata.pop(ZEROS, ())
        if missing:
            places = [place for place, value in enumerate(args) if value is None]
            for place, tangent in zip(places, missing, strict=True):
                args[place] = tangent.zeros()
        return run(args)

    return boxed(backward)
