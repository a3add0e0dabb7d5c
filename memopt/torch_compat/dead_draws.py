"""What draws random numbers though nothing reads them: kept in graphs that are traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch._inductor import config


@contextlib.contextmanager
def dead_draws_kept() -> Iterator[None]:
    """Within: AOTAutograd keeps such nodes, as eager draws there; without them every later draw is another one.

    It erases dead draws from a graph unless Inductor is to draw as eager does (torch 2.11 to 2.13), so that it is told:
    code that Inductor makes within draws as eager does too. Tried on torch 2.13.
    """
    with config.patch(fallback_random=True):
        yield
