"""Functions that Dynamo calls while it traces, and what they raise: an error of the traced code, which may catch it.

`importlib.metadata.version` of a package that is not installed is one: libraries ask so which of others there are.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch._dynamo import exc
from torch._dynamo.variables import functions

from memopt.common.scoped import Hook


def folded_errors_raise() -> contextlib.AbstractContextManager[None]:
    """Within: `PackageNotFoundError` and its kind are raised in the traced code, where Dynamo fails with it otherwise.

    Elsewhere, and in other threads, tracing is as ever. Needed on torch 2.13, which calls such functions itself.
    """
    return _hook.within()


@Hook
def _hook() -> None:
    """Look at what such a call raises, once in a process."""
    kind: Any = getattr(functions, "SkipFunctionVariable", None)
    raised: Any = getattr(exc, "raise_observed_exception", None)
    if kind is None or raised is None:
        return
    plain = kind.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        try:
            return plain(self, tx, args, kwargs)
        except ImportError as error:
            if not _hook.in_force:
                raise
            return raised(type(error), tx, args=[str(error)])

    kind.call_function = call_function
