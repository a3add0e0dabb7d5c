"""Sources of kernels that a copy of this process generates, compiled here from when they are known.

Inductor has the processes of its pool compile a kernel as soon as its source is there. They belong to the first
process; so the copy writes sources to a file that both have open, and the first reads on where it last stopped.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from typing import Any

from memopt.torch_compat.kernel_pool import compile_kernels, hand_over

_LENGTH = 8  # bytes of the number that says how long a source is


class KernelSources:
    """Made before the copy is: what it tells, this process hears."""

    def __init__(self) -> None:
        """Nothing is told yet."""
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - see `close`
        self._heard = 0  # bytes
        self._waiting: list[tuple[Any, ...]] = []  # until the pool's processes have started

    def tell(self) -> None:
        """Have this process, the copy, tell sources instead of compiling them."""

        def tell(arguments: tuple[Any, ...]) -> None:
            told = pickle.dumps(arguments)
            os.write(self._file.fileno(), len(told).to_bytes(_LENGTH, "little") + told)

        hand_over(tell)

    def close(self) -> None:
        """Hear no more."""
        self._file.close()

    def listen(self) -> None:
        """Have kernels compiled that were told since the last time; Inductor finds them when it loads the code."""
        number = self._file.fileno()
        text = os.pread(number, os.fstat(number).st_size - self._heard, self._heard)
        while len(text) >= _LENGTH:
            length = _LENGTH + int.from_bytes(text[:_LENGTH], "little")
            if len(text) < length:  # it is being written
                break
            self._waiting.append(pickle.loads(text[_LENGTH:length]))
            self._heard, text = self._heard + length, text[length:]
        if self._waiting and compile_kernels(self._waiting):
            self._waiting.clear()
