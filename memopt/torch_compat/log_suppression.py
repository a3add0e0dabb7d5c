"""What torch's pipeline puts into words for its logs, left out where nobody reads them.

AOTAutograd prints the joint graph and both graphs, and Inductor describes every part of a cache's key, whether a log
takes it or not: about as long as the keys and a tenth of tracing take, for a graph of some thousand operations. Torch
has no setting for either. Tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from torch._functorch._aot_autograd import autograd_cache, graph_compile
from torch._inductor import codecache
from torch._logging._internal import trace_log

from memopt.torch_compat.patched import replaced

# AOTAutograd's functions that print graphs, by what they return where nothing is to be logged.
_PRINTS = {"_log_joint_graph": None, "_log_fw_bw_graphs": (None, None)}


@contextlib.contextmanager
def unread_logs_suppressed() -> Iterator[None]:
    """Within: what no log is set up for is not put into words."""
    with contextlib.ExitStack() as stack:
        if not trace_log.handlers and not _logs(logging.INFO, "aot_joint_log", "aot_graphs_log"):
            for name, nothing in _PRINTS.items():
                if hasattr(graph_compile, name):  # not in torch 2.9
                    stack.enter_context(replaced(graph_compile, name, lambda *_, _nothing=nothing: _nothing))
        if not any(log.isEnabledFor(logging.DEBUG) for log in (codecache.log, autograd_cache.log)):
            stack.enter_context(replaced(codecache.FxGraphCachePickler, "debug_lines", lambda *_: []))
        yield


def _logs(level: int, *names: str) -> bool:
    return any(getattr(graph_compile, name).isEnabledFor(level) for name in names if hasattr(graph_compile, name))
