"""The user's own `random.Random`, which Dynamo reads once: compiled code would draw the numbers of the trace for ever.

Tried on 2.13.
"""

from __future__ import annotations

import contextlib
import types
from typing import Any

from torch._dynamo.variables import builder

from memopt.common.scoped import Hook


def own_random_objects() -> contextlib.AbstractContextManager[None]:
    """Within: what draws from a `random.Random` that was there before runs as it is, between graphs.

    Elsewhere, and in other threads, tracing is as ever.
    """
    return _hook.within()


@Hook
def _hook() -> None:
    """Ask here which of them are traced, once in a process."""
    where: Any = builder
    plain = where.RandomVariable

    def is_traced(val: Any) -> bool:
        return not _hook.in_force and bool(plain.is_supported_random_obj(val))

    asked = {"is_supported_random_obj": staticmethod(is_traced)}
    where.RandomVariable = types.new_class("RandomVariable", (plain,), exec_body=lambda body: body.update(asked))
