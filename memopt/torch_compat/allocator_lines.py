"""The CPU's allocator without its words on stderr while it is looked at.

While a profiler records memory, it warns of every thousandth release of a block that was allocated before, as all of a
model is. Torch has no setting for it but the process's level of such lines, which is read anew at each of them.
Tried on torch 2.11 and 2.13; a build whose lines go through glog has no such level, and keeps them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

_WARNING, _ERROR = 1, 2
_lock = threading.Lock()
_within: list[object] = []  # the blocks of all threads: the last one to end sets the level back


@contextlib.contextmanager
def unknown_blocks_unsaid() -> Iterator[None]:
    """Within: lines of the level WARNING that torch's C++ code writes do not appear, in any thread.

    Nothing changes where the user asked for more or fewer lines than torch writes by default (`TORCH_CPP_LOG_LEVEL`).
    """
    level, block = _level(), object()
    with _lock:
        if level is not None and (_within or level.value == _WARNING):
            _within.append(block)
            level.value = _ERROR
    try:
        yield
    finally:
        with _lock:
            if level is not None and block in _within:
                _within.remove(block)
                level.value = _ERROR if _within else _WARNING


@functools.cache
def _level() -> ctypes.c_int | None:
    """The process's level of such lines, where it stands in this build."""
    for path in (Path(torch.__file__).parent / "lib").glob("libc10.*"):
        with contextlib.suppress(OSError, ValueError):
            return ctypes.c_int.in_dll(ctypes.CDLL(str(path)), "FLAGS_caffe2_log_level")
    return None
