"""Saved tensors that code of backward may write over: donated, as AOTAutograd has it; tried on 2.13.

AOTAutograd refuses to keep a graph for a second backward where any is donated. Who takes care of that clears the list.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import graph_compile
from torch._guards import TracingContext

from memopt.torch_compat.patched import replaced

_COLLECT = "collect_bw_donated_buffer_idxs"


@contextlib.contextmanager
def nothing_donated() -> Iterator[None]:
    """Within, what AOTAutograd lowers donates nothing, whatever the user's setting: a graph may always be kept."""
    if not hasattr(graph_compile, _COLLECT):
        yield
        return
    # Without the setting the list is None, which is refused as well.
    with replaced(graph_compile, _COLLECT, lambda *args, **options: []), functorch_config.patch(donated_buffer=True):
        yield


def may_donate() -> Any:
    """A context within which AOTAutograd donates what it can, whatever the user's setting."""
    return functorch_config.patch(donated_buffer=True)


def donated_now() -> list[int]:
    """The donated arguments of the backward that is lowered now: AOTAutograd's own list, to be cleared in place."""
    context = TracingContext.try_get()
    found = None if context is None else getattr(context.fw_metadata, "bw_donated_idxs", None)
    return [] if found is None else found
