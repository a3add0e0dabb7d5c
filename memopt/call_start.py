"""What a call may have changed before it must begin anew: as when more graphs come than were planned for."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_SMALL = 2**20  # bytes of a buffer that is copied: what counts or averages is small, larger ones are tables and masks
_PLAIN = (int, float, bool, str, type(None))


class CallStart:
    """A model's state at the start of a call: random numbers, small buffers, and plain attributes such as counters."""

    def __init__(self, model: nn.Module, *, state: bool) -> None:
        """Remember the state.

        Args:
            model: about to be called.
            state: whether more than the random numbers may be needed.
        """
        self._random = bytearray(torch.get_rng_state().tolist())  # no tensor, which would take a part of a budget
        self._devices = sorted({p.device.index for p in model.parameters() if p.is_cuda}) if state else []
        self._device_random = [torch.cuda.get_rng_state(index) for index in self._devices]
        self._buffers: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor, int]] = []
        self._plain: list[tuple[dict[str, Any], dict[str, Any]]] = []
        if not state:
            return
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and _is_copied(buffer):
                    known = module._buffers, name, buffer, buffer.detach().clone(), buffer._version
                    self._buffers.append(known)
            attributes = module.__dict__
            self._plain.append((attributes, {k: v for k, v in attributes.items() if type(v) in _PLAIN}))

    def restore(self) -> None:
        """Set back what has changed since."""
        torch.set_rng_state(torch.frombuffer(self._random, dtype=torch.uint8))
        for index, state in zip(self._devices, self._device_random, strict=True):
            torch.cuda.set_rng_state(state, index)
        with torch.no_grad():
            for owner, name, buffer, copy, version in self._buffers:
                owner[name] = buffer
                if buffer._version != version:
                    buffer.copy_(copy)
        for attributes, values in self._plain:
            attributes.update(values)


def _is_copied(buffer: torch.Tensor) -> bool:
    plain = type(buffer) is torch.Tensor and buffer.layout is torch.strided
    return plain and not (buffer.is_meta or buffer.is_inference()) and buffer.numel() * buffer.element_size() <= _SMALL
