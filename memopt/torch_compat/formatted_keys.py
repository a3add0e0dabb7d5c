"""Strings that are formatted of tensors, as keys of dictionaries and sets, while Dynamo traces.

Dynamo formats such a string behind its graph, and until then no key equals it: a look-up returns its default without a
word, or raises the `KeyError` of a model that has the key.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch._dynamo import exc
from torch._dynamo.variables import misc

from memopt.common.scoped import Hook


def formatted_keys() -> contextlib.AbstractContextManager[None]:
    """Within: a look-up by a string that is formatted of a tensor ends a graph, and happens behind it.

    Elsewhere, and in other threads, tracing is as ever. Needed on torch 2.13, which knows no hash of such a string.
    """
    return _hook.within()


@Hook
def _hook() -> None:
    """Ask before Dynamo makes a key of such a string, once in a process."""
    kind: Any = misc.StringFormatVariable
    plain = getattr(kind, "hash_impl", None)
    if plain is None:
        return

    def hash_impl(self: Any, tx: Any) -> Any:
        if not _hook.in_force:
            return plain(self, tx)
        unimplemented: Any = exc.unimplemented
        return unimplemented(
            gb_type="A key that is formatted of a tensor",
            context=str(self),
            explanation="The string is known when the graph has run.",
            hints=["Choose by a tensor's value outside of the model, or without strings."],
        )

    kind.hash_impl = hash_impl
