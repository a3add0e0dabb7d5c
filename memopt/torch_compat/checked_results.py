"""What checks a factorization's result, and returns nothing, stays in a graph: it raises where eager does.

Torch 2.11 drops the call (`aten::_linalg_check_errors`) from compiled graphs, as nothing reads it: a Cholesky
factorization of what has none returned numbers without a word. Torch 2.13 has it among what has effects.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._higher_order_ops import effects

_CHECK = "aten::_linalg_check_errors"


@functools.cache
def keep_checks() -> None:
    """Keep such calls from now on in this process, as torch 2.13 does; tried on 2.11 and 2.13."""
    register: Any = getattr(effects, "_register_effectful_op", None)
    find: Any = getattr(effects, "_get_effect", None)
    if register is not None and find is not None and find(torch.ops.aten._linalg_check_errors.default) is None:
        register(_CHECK, effects._EffectType.ORDERED)
