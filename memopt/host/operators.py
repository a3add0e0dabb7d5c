"""Operators that copy a value to the host's memory and back while the device goes on computing.

In a graph `landed(value, held)` stands for `held` and `arrived(value, held)` for `value`: what they return is that very
memory, known to be complete. A value is there until `landed` has read it, so its memory is the device's again from a
place that the graph says, whenever the copy really ends. Values of another device than CUDA's are simply copied.
"""

from __future__ import annotations

import torch

from memopt.host.buffers import buffers_of, flat
from memopt.torch_compat.saved_tensors import hooks_in_force

_LIBRARY = torch.library.Library("memopt", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema in (
    "to_host(Tensor value) -> Tensor",
    "landed(Tensor value, Tensor held) -> Tensor",
    "landed_into(Tensor value, Tensor(a!) held) -> ()",
    "fetch(Tensor held, Device place) -> Tensor",
    "arrived(Tensor value, Tensor held) -> Tensor",
    "arrived_into(Tensor(a!) value, Tensor held) -> ()",
):
    _LIBRARY.define(_schema)  # type: ignore[no-untyped-call]

# Begin to copy a value; what is returned is complete where it has landed.
TO_HOST = torch.ops.memopt.to_host.default
LANDED, LANDED_INTO = torch.ops.memopt.landed.default, torch.ops.memopt.landed_into.default
# Begin to copy it back to a device; what is returned is complete where it has arrived.
FETCH = torch.ops.memopt.fetch.default
ARRIVED, ARRIVED_INTO = torch.ops.memopt.arrived.default, torch.ops.memopt.arrived_into.default


def _to_host(value: torch.Tensor) -> torch.Tensor:
    return buffers_of(value.device).send(value) if value.is_cuda else _copied(value)


def _fetch(held: torch.Tensor, place: torch.device) -> torch.Tensor:
    return buffers_of(place).fetch(held) if place.type == "cuda" else _copied(held)


def _landed_into(value: torch.Tensor, held: torch.Tensor) -> None:
    if value.is_cuda:
        buffers = buffers_of(value.device)
        buffers.wait(held)
        if hooks_in_force():  # they may read it on the host, which no stream makes wait
            buffers.settle(held)


def _arrived_into(value: torch.Tensor, held: torch.Tensor) -> None:
    if value.is_cuda:
        buffers_of(value.device).wait(held)


def _landed(value: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    _landed_into(value, held)
    return held


def _arrived(value: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    _arrived_into(value, held)
    return value


def _copied(value: torch.Tensor) -> torch.Tensor:
    other = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
    flat(other).copy_(flat(value))
    return other


def _fake_to_host(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cpu")


def _fake_fetch(held: torch.Tensor, place: torch.device) -> torch.Tensor:
    return torch.empty_strided(held.size(), held.stride(), dtype=held.dtype, device=place)


def _fake_nothing(value: torch.Tensor, held: torch.Tensor) -> None:
    return None


for _name, _kernel, _fake in (
    ("to_host", _to_host, _fake_to_host),
    ("landed", _landed, lambda value, held: held),
    ("landed_into", _landed_into, _fake_nothing),
    ("fetch", _fetch, _fake_fetch),
    ("arrived", _arrived, lambda value, held: value),
    ("arrived_into", _arrived_into, _fake_nothing),
):
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"memopt::{_name}", _fake, lib=_LIBRARY)
