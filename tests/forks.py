"""A copy of the test's process, where others of its tests may have begun threads."""

from __future__ import annotations

import os
import warnings


def fork() -> int:
    """What `os.fork` returns, without the warnings of Python and JAX of threads: no copy needs them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return os.fork()  # noqa: TID251
