"""Where memopt's own code lies: by frames in it errors, and lines of the user's, are told apart from its own."""

from __future__ import annotations

import os
import sysconfig

MEMOPT = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
"""The folder of all its rooms, with a separator at its end."""

_LIBRARY = os.path.abspath(sysconfig.get_path("stdlib")) + os.sep
_SITES = tuple({os.path.abspath(sysconfig.get_path(name)) + os.sep for name in ("purelib", "platlib")})


def is_pythons(file: str) -> bool:
    """Whether a file is of Python's own library; what is installed into it is not."""
    return file.startswith(_LIBRARY) and not file.startswith(_SITES)
