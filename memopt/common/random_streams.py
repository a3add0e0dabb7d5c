"""The streams of random numbers that a model may draw from: torch's on each device, Python's and NumPy's."""

from __future__ import annotations

import contextlib
import pickle
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch


class RandomStreams:
    """Where the streams are, to go back to."""

    def __init__(self, devices: Sequence[int] = ()) -> None:
        """Now.

        Args:
            devices: numbers of the CUDA devices whose streams are remembered too.
        """
        self._torch = bytearray(torch.get_rng_state().tolist())  # no tensor, which would take a part of a budget
        self._devices = [(index, torch.cuda.get_rng_state(index)) for index in devices]
        self._host = _host_streams()

    def restore(self) -> None:
        """Go back."""
        torch.set_rng_state(torch.frombuffer(self._torch, dtype=torch.uint8))
        for index, state in self._devices:
            torch.cuda.set_rng_state(state, index)
        _set_host_streams(*self._host)


@contextlib.contextmanager
def streams_kept() -> Iterator[None]:
    """Within: what is drawn on the host leaves no trace, as where a model runs on fake tensors to be planned."""
    before = RandomStreams()
    try:
        yield
    finally:
        before.restore()


def host_state() -> bytes:
    """Where Python's and NumPy's streams are; equal where they are at the same place."""
    return pickle.dumps(_host_streams())


def set_host_state(state: bytes) -> None:
    """Go back to what `host_state` returned."""
    _set_host_streams(*pickle.loads(state))


def _host_streams() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state(legacy=False)


def _set_host_streams(python: Any, numpy: Any) -> None:
    random.setstate(python)
    np.random.set_state(numpy)
