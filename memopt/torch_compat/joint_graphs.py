"""Where AOTAutograd traces a joint graph and Inductor rewrites it, with other functions in their places.

No setting lets either be given what was made before. Tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch._functorch._aot_autograd import graph_compile
from torch._inductor import compile_fx

from memopt.torch_compat.patched import replaced

_TRACE, _REWRITE = "aot_dispatch_autograd_graph", "_recursive_joint_graph_passes"
Around = Callable[[Callable[..., Any]], Callable[..., Any]]


@contextlib.contextmanager
def joint_graphs_by(trace: Around, rewrite: Around) -> Iterator[None]:
    """Within: joint graphs are traced, and rewritten by Inductor's passes, by what these make of torch's own functions.

    Args:
        trace: of AOTAutograd's function, which takes the graph's function, its arguments and `fw_metadata`, to which it
            adds what it learns; it returns the graph first and what is known of tensor subclasses last.
        rewrite: of Inductor's, which takes a graph and returns one.
    """
    with (
        replaced(graph_compile, _TRACE, trace(getattr(graph_compile, _TRACE))),
        replaced(compile_fx, _REWRITE, rewrite(getattr(compile_fx, _REWRITE))),
    ):
        yield
