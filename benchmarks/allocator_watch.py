"""What torch's CPU allocator holds in this process, whatever else looks at it: `allocator_watch.c`, preloaded.

`torch.profiler` sees the same events, but one looker at a time: what memopt does in its first steps it sees alone.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_longlong, ctypes.c_longlong)


def preloaded(module: str) -> None:
    """Go on only where the watch is preloaded: else begin this process anew with it, as `python -m MODULE ARGUMENTS`.

    Raises:
        OSError: there is no C compiler.
    """
    if os.environ.get("LD_PRELOAD", "").endswith("allocator_watch.so"):
        return
    library = Path(tempfile.mkdtemp()) / "allocator_watch.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
    os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], environment)


class Watch:
    """The allocator's bytes: alive, and the most since `begin`."""

    def __init__(self) -> None:
        """Where the watch is preloaded."""
        self._library = ctypes.CDLL(None)
        for name in ("watch_live", "watch_peak"):
            getattr(self._library, name).restype = ctypes.c_longlong
        self._kept: list[object] = []

    def begin(self) -> None:
        """Forget the peak so far."""
        self._library.watch_begin()

    @property
    def live(self) -> int:
        """Bytes that are there now."""
        return int(self._library.watch_live())

    @property
    def peak(self) -> int:
        """The most bytes since `begin`."""
        return int(self._library.watch_peak())

    def trap(self, above: int, call: Callable[[int, int], None]) -> None:
        """Call back once as soon as more bytes than these are there, with their number and the latest block's."""
        self._kept.append(_CALLBACK(call))
        self._library.watch_trap(ctypes.c_longlong(above), self._kept[-1])
