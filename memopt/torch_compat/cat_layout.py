"""`torch.cat` of one tensor, as Inductor writes it out: it lies as the operator's own result.

Inductor leaves out tensors without elements, and of one that is left makes a copy laid out as that is: a cache's first
`torch.cat([empty, keys])` lies transposed then, where eager's is contiguous.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor import decomposition
from torch._prims_common import suggest_memory_format

_CAT = torch.ops.aten.cat.default


@functools.cache
def keep_cat_layout() -> None:
    """Have such results lie as eager's, from now on in this process; tried on torch 2.11 and 2.13."""
    known: Any = getattr(decomposition, "decompositions", {}).get(_CAT)
    if known is None:
        return

    @functools.wraps(known)
    def cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
        made = known(tensors, dim)
        if not isinstance(made, torch.Tensor):
            return made
        formats = {suggest_memory_format(tensor) for tensor in tensors}
        format_ = formats.pop() if len(formats) == 1 else torch.contiguous_format
        return made if made.is_contiguous(memory_format=format_) else made.clone(memory_format=format_)

    decomposition.decompositions[_CAT] = cat
    clear = getattr(getattr(decomposition, "fast_random_decomps", None), "cache_clear", None)
    if clear is not None:
        clear()
