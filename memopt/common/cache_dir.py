"""Where memopt keeps what it found from one process to the next: measured costs and plans."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_dir() -> Path | None:
    """The folder of caches, which may not exist yet; None where nothing is to be kept on disk.

    `MEMOPT_CACHE=0` keeps nothing; `MEMOPT_CACHE_DIR` names the folder; else it is the platform's for a user's caches.
    """
    if os.environ.get("MEMOPT_CACHE") == "0":
        return None
    if named := os.environ.get("MEMOPT_CACHE_DIR"):
        return Path(named)
    try:
        home = Path.home()
    except RuntimeError:  # a user without a home
        return None
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "memopt"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "memopt" / "Cache"
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path is to be ignored.
    return (Path(xdg) if os.path.isabs(xdg) else home / ".cache") / "memopt"
