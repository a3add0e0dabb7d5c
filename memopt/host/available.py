"""How much of the host's memory may be pinned."""

from __future__ import annotations

import os
from pathlib import Path

_LIMIT, _USED = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
_SYSTEM = Path("/proc/meminfo")


def available_bytes() -> int:
    """Bytes of the host's memory that are to be had, for one of as many processes as are started here together."""
    free = [size for size in (_of_system(), _of_group()) if size is not None]
    return min(free, default=0) // _processes()


def _of_system() -> int | None:
    try:
        lines = _SYSTEM.read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):  # not Linux
        try:
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError):
            return None


def _of_group() -> int | None:
    """What a container's limit leaves."""
    try:
        return max(0, int(_LIMIT.read_text(encoding="ascii")) - int(_USED.read_text(encoding="ascii")))
    except (OSError, ValueError):  # there is none
        return None


def _processes() -> int:
    """As torchrun says it."""
    number = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(number)) if number.isdecimal() else 1
