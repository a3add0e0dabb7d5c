"""What reads memory that a kernel writes to, when Inductor lays out its loops anew: it still comes behind the kernel.

Inductor's scheduler names such a read by the write that it comes behind. When it merges kernels on a CPU it reads off
the loops again what each reads, and forgets that name: `buffer[:, 0] += 1; x + buffer` may read the old column then.
"""

from __future__ import annotations

import functools
from typing import Any

from torch._inductor.scheduler import SchedulerNode


@functools.cache
def keep_renamed_reads() -> None:
    """Have reads keep their names, from now on in this process; tried on torch 2.13."""
    known: Any = SchedulerNode
    lay_out = getattr(known, "recompute_size_and_body", None)
    if lay_out is None or not hasattr(known, "set_read_writes"):
        return

    @functools.wraps(lay_out)
    def recompute_size_and_body(self: Any, *args: Any, **options: Any) -> None:
        lay_out(self, *args, **options)
        names = getattr(self, "mutation_renames", None)
        if names:
            self.set_read_writes(self.read_writes.rename(names))

    known.recompute_size_and_body = recompute_size_and_body
