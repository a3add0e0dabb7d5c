"""Tensors without values, and the modes that make them; tried on torch 2.11 and 2.13."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch._prims_common import suggest_memory_format as suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily

from memopt.torch_compat import gradients_of_losses

gradients_of_losses.correct()  # before anything runs on them: what an operator was found to give is kept


def no_fake_mode() -> contextlib.AbstractContextManager[Any]:
    """Within: what is made and called is real, though a mode of fake tensors may be in force around it."""
    return unset_fake_temporarily()


def has_symbols(tensor: torch.Tensor) -> bool:
    """Whether a size or a stride of a tensor is a symbol, without a guard on any."""
    return bool(tensor._has_symbolic_sizes_strides)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor has each element of its memory once, in whatever order; False where symbols leave it open."""
    return bool(is_non_overlapping_and_dense_or_false(tensor))
