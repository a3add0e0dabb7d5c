"""Names of classes and functions that Dynamo puts into graphs whole, `type(weight).__module__` say, while it traces.

Dynamo leaves an attribute of theirs to be read, and ends the graph at each method of the string that it is: PEFT asks
every layer of DoRA whether its weight is one of torchao's, and each was a graph of its own.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch._dynamo.variables import ConstantVariable, GetAttrVariable, TorchInGraphFunctionVariable, builtin

from memopt.common.scoped import Hook

_NAMES = ("__module__", "__name__", "__qualname__")


def class_names() -> contextlib.AbstractContextManager[None]:
    """Within: such a name is a string while Dynamo traces; what is guarded is the class or function that has it.

    Elsewhere, and in other threads, tracing is as ever. Needed on torch 2.13; 2.11 knows the methods of such a string.
    """
    return _hook.within()


@Hook
def _hook() -> None:
    """Look at each attribute that Dynamo reads by `getattr` or a dot, once in a process."""
    kind: Any = getattr(builtin, "GetAttrBuiltinVariable", None)
    plain = getattr(kind, "_call_getattr", None)
    if plain is None:
        return

    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = plain(self, *args, **kwargs)
        if _hook.in_force and isinstance(found, GetAttrVariable) and found.name in _NAMES:
            owner = found.obj
            name = getattr(owner.value, found.name) if isinstance(owner, TorchInGraphFunctionVariable) else None
            if isinstance(name, str):
                return ConstantVariable.create(name)
        return found

    kind._call_getattr = read
