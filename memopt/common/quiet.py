"""PyTorch without what it prints beside what it does: exporters, the profiler, the CUDA allocator's settings."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import IO

from memopt.torch_compat.logs import WHILE_EXPORTING


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep back what is printed and logged while a block exports a model; nothing where memopt's own log says all."""
    if logging.getLogger("memopt").isEnabledFor(logging.DEBUG):
        yield
        return
    loggers = [logging.getLogger(name) for name in WHILE_EXPORTING]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


_lock = threading.Lock()


@contextlib.contextmanager
def without_lines(*words: str) -> Iterator[None]:
    """Within: lines with one of these words that C++ code writes to stderr are dropped.

    All other lines appear when the block ends. Nothing is changed where another thread is within such a block.
    """
    real = None
    if not _lock.acquire(blocking=False):
        yield
        return
    try:
        with tempfile.TemporaryFile() as kept:
            with contextlib.suppress(OSError, ValueError):  # a process without stderr has nothing to be kept from it
                sys.stderr.flush()
                real = os.dup(2)
                os.dup2(kept.fileno(), 2)
            try:
                yield
            finally:
                if real is not None:
                    _back(real, kept, [word.encode() for word in words])
    finally:
        _lock.release()


def _back(real: int, kept: IO[bytes], words: list[bytes]) -> None:
    """Let stderr be what it was, and write what was kept of it."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os.dup2(real, 2)
    os.close(real)
    kept.seek(0)
    rest = b"".join(line for line in kept if not any(word in line for word in words))
    with contextlib.suppress(OSError):
        while rest:
            rest = rest[os.write(2, rest) :]
