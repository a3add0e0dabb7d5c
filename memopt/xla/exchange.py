"""Tensors between PyTorch and JAX by DLPack: the same memory, no copy through the host."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import torch
import torch.utils.dlpack

from memopt.xla.layout import Order, inverse

# The attribute of a tensor that stands for an array.
_CARRIED = "_memopt_array"
# XLA reads its arguments in whole vectors: what does not begin at such a multiple of bytes is copied first.
_ALIGNMENT = {"cpu": 64, "cuda": 16}


class Importer:
    """Arguments as JAX arrays, those that stay in their place imported once.

    An array that shares a tensor's memory shows what an optimizer writes there, so such an argument is imported again
    only when it has moved. What cannot be shared (another layout, an odd address) is copied at every call.
    """

    def __init__(self, stays: Collection[str], first: Sequence[str], orders: Mapping[str, Order]) -> None:
        """Import later.

        Args:
            stays: names of the arguments that are the same tensors at every call.
            first: names of those that the first executable reads. On CUDA XLA starts it behind what PyTorch had queued
                when the last of these was imported, so that one of them is imported at every call.
            orders: in which order of their axes arguments are exchanged, by name.
        """
        self._orders = {name: order for name, order in orders.items() if order}
        self._stays, self._first = frozenset(stays), frozenset(first)
        self._known: dict[str, tuple[tuple[Any, ...], Any]] = {}

    def __call__(self, given: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """One array per tensor, by name."""
        values = {name: array for name, value in given.items() if (array := getattr(value, _CARRIED, None)) is not None}
        given = {
            name: value.permute(self._orders[name]) if name in self._orders else value
            for name, value in given.items()
            if name not in values
        }
        values.update((name, to_jax(value)) for name, value in given.items() if name not in self._stays)
        values.update((name, self._kept(name, value)) for name, value in given.items() if name in self._stays)
        if not any(given[name].numel() for name in self._first - self._stays if name in given):
            self._order(given, values)
        return values

    def _kept(self, name: str, value: torch.Tensor) -> Any:
        place = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        known = self._known.get(name)
        if known is not None and known[0] == place:
            return known[1]
        self._known.pop(name, None)
        array = to_jax(value)
        if array.unsafe_buffer_pointer() == value.data_ptr():
            self._known[name] = (place, array)
        return array

    def _order(self, given: Mapping[str, torch.Tensor], values: dict[str, Any]) -> None:
        """Let XLA's stream wait for PyTorch's where every argument of the first executable is one that stays."""
        device = next((value.device for value in given.values() if value.device.type == "cuda"), None)
        if device is None:
            return
        least = min(self._first & given.keys(), key=lambda name: given[name].numel(), default=None)
        if least is None or not given[least].numel():
            torch.cuda.current_stream(device).synchronize()
        else:
            values[least] = to_jax(given[least])


def to_jax(value: torch.Tensor) -> Any:
    """The tensor as a JAX array on its own device, in its own memory where its layout allows."""
    value = value.detach()
    if not value.is_contiguous() or value.data_ptr() % _ALIGNMENT.get(value.device.type, 1):
        value = value.clone(memory_format=torch.contiguous_format)
    if 1 in value.shape and value.stride() != (strides := _strides(value.shape)):
        value = value.as_strided(value.shape, strides)  # that of a single element may be any: JAX sees a layout in it
    if not value.numel():
        shape = jax.ShapeDtypeStruct(tuple(value.shape), _dtype(value))
        return jax.device_put(jax.numpy.zeros(shape.shape, shape.dtype), _device(value))
    return jax.dlpack.from_dlpack(value)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Those of a contiguous tensor."""
    found = [1]
    for size in reversed(shape[1:]):
        found.append(found[-1] * max(1, size))
    return tuple(reversed(found))


class Exporter:
    """Arrays as tensors in the same memory, behind what is queued on PyTorch's stream of now."""

    def __init__(self, device: torch.device) -> None:
        # Asked once: PyTorch's own way asks several times for each tensor. 1 is the default stream, as DLPack has it.
        self._stream = (torch.cuda.current_stream(device).cuda_stream or 1) if device.type == "cuda" else None

    def __call__(self, array: Any, like: torch.Tensor | None = None, order: Order = None) -> torch.Tensor:
        """The array, whose axes are in this order; with `like`, laid out as that one is."""
        capsule = array.__dlpack__(stream=self._stream) if array.size else None
        result = _empty(array) if capsule is None else torch.utils.dlpack.from_dlpack(capsule)
        result = result.permute(inverse(order)) if order else result
        if like is None or result.stride() == like.stride():
            return result
        laid_out = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=result.device)
        return laid_out.copy_(result)


def carried(array: Any) -> torch.Tensor:
    """An empty tensor that stands for the array on its way to an `Importer`, where nothing else will look at it.

    Autograd keeps the very tensor that is saved for backward, and so the array, as long as it keeps its graph.
    """
    value = torch.empty(0)
    setattr(value, _CARRIED, array)
    return value


def _empty(array: Any) -> torch.Tensor:
    device = next(iter(array.devices()))
    kind = torch.device("cpu") if device.platform == "cpu" else torch.device("cuda", device.local_hardware_id or 0)
    return torch.empty(array.shape, dtype=_TORCH[str(array.dtype)], device=kind)


def _dtype(value: torch.Tensor) -> Any:
    from memopt.xla.table import jax_dtype

    return jax_dtype(value.dtype)


def _device(value: torch.Tensor) -> Any:
    platform = "cpu" if value.device.type == "cpu" else "cuda"
    return jax.devices(platform)[value.device.index or 0]


_TORCH = {
    "bool": torch.bool, "uint8": torch.uint8, "int8": torch.int8, "int16": torch.int16, "int32": torch.int32,
    "int64": torch.int64, "float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32,
    "float64": torch.float64, "complex64": torch.complex64, "complex128": torch.complex128,
}  # fmt: skip
