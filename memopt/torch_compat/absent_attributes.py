"""Attributes that a class's own `__getattr__` answers for, as objects have none of that name, while Dynamo traces.

Dynamo guards what `__getattr__` has read, and not that it was asked: an attribute of that name that is set afterwards
is not seen. Tried on 2.11, 2.13 and 2.14, where the method has another name.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from torch import nn
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.variables import user_defined

from memopt.common.scoped import Hook


def absent_attributes() -> contextlib.AbstractContextManager[None]:
    """Within: that an object has no attribute of a name, which `__getattr__` of its class answers for, is guarded.

    Elsewhere, and in other threads, tracing is as ever.
    """
    return _hook.within()


@Hook
def _hook() -> None:
    """Look at each attribute that Dynamo reads of an object, once in a process."""
    kind: Any = user_defined.UserDefinedObjectVariable
    method = "var_getattr" if hasattr(kind, "var_getattr") else "tp_getattro_impl"
    plain = getattr(kind, method)

    def guarded(self: Any, tx: Any, name: str) -> Any:
        written = tx.output.side_effects.has_pending_mutation_of_attr
        if _hook.in_force and self.source and _is_answered(self.value, name) and not written(self, name):
            absent = functools.partial(GuardBuilder.NOT_PRESENT_IN_GENERIC_DICT, attr=name)
            install_guard(self.source.make_guard(absent))
        return plain(self, tx, name)

    setattr(kind, method, guarded)


def _is_answered(value: Any, name: str) -> bool:
    """Whether `__getattr__` of a user's class answers for a name."""
    kind = type(value)
    own = getattr(kind, "__getattr__", None)
    if own is None or own is nn.Module.__getattr__ or name.startswith("__") or hasattr(kind, name):
        return False
    return name not in getattr(value, "__dict__", {name: None})
