"""The user's own `random.Random`, which Dynamo reads once: compiled code would draw the numbers of the trace for ever.

Tried on 2.13.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import types
from typing import Any

from torch._dynamo.variables import builder

from memopt.common.scoped import scoped

_in_force = contextvars.ContextVar("in_force", default=False)


def own_random_objects() -> contextlib.AbstractContextManager[None]:
    """Within: what draws from a `random.Random` that was there before runs as it is, between graphs.

    Elsewhere, and in other threads, tracing is as ever.
    """
    _install()
    return scoped(_in_force, True)


@functools.cache
def _install() -> None:
    """Ask here which of them are traced, once in a process."""
    where: Any = builder
    plain = where.RandomVariable

    def is_traced(val: Any) -> bool:
        return not _in_force.get() and bool(plain.is_supported_random_obj(val))

    asked = {"is_supported_random_obj": staticmethod(is_traced)}
    where.RandomVariable = types.new_class("RandomVariable", (plain,), exec_body=lambda body: body.update(asked))
