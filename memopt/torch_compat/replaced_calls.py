"""Other code for functions while Dynamo traces: what it cannot trace without a break, by what does the same in a graph.

Elsewhere than under `replaced_calls`, and in other threads, tracing is as ever.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch._dynamo.variables import functions
from torch._dynamo.variables import torch as torch_variables

from memopt.common.scoped import scoped

Replacements = Mapping[Callable[..., Any], Callable[..., Any]]

_in_force: contextvars.ContextVar[Replacements | None] = contextvars.ContextVar("in_force", default=None)


def replaced_calls(replacements: Replacements) -> contextlib.AbstractContextManager[None]:
    """Within: where traced code calls one of these Python functions, the function given for it is traced instead.

    Calls from a replacement are not replaced. Tried on torch 2.13.
    """
    _install()
    return scoped(_in_force, replacements)


@functools.cache
def _install() -> None:
    """Ask for replacements before Dynamo inlines a function, once in a process."""
    inlined: Any = functions.UserFunctionVariable
    operation: Any = torch_variables.TorchInGraphFunctionVariable
    call_inlined, call_operation = inlined.call_function, operation.call_function

    def replacement(function: Any, tx: Any) -> Any:
        known = _in_force.get()
        other = known.get(function) if known else None
        return None if other is None or tx.f_code is other.__code__ else inlined(other)

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        return call_inlined(replacement(self.fn, tx) or self, tx, args, kwargs)

    def call_in_graph(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        other = replacement(self.value, tx)
        return call_operation(self, tx, args, kwargs) if other is None else call_inlined(other, tx, args, kwargs)

    inlined.call_function, operation.call_function = call_function, call_in_graph
