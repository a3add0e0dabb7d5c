"""Operators that torch writes out in simpler ones, in Python or in C++; tried on torch 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import decomposition_table

from memopt.torch_compat.operators import OpOverload


def is_written_out(target: OpOverload) -> bool:
    """Whether torch writes an operator out in others."""
    return target in decomposition_table or target.has_kernel_for_dispatch_key(
        torch._C.DispatchKey.CompositeImplicitAutograd
    )


def decomposition_of(target: OpOverload) -> Callable[..., Any]:
    """The function by which torch writes out an operator of which `is_written_out` holds."""
    return decomposition_table.get(target) or target.decompose
