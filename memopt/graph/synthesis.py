"""Made-up values for real runs: like the fake ones in shape, strides, dtype and device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from memopt.torch_compat import pytree


def synthesize(value: Any, *, scale: float = 1.0) -> Any:
    """A real value like the fake one: random floats, zeros for integers and booleans; numbers stay as they are."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        with torch.no_grad():
            made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
            if leaf.is_floating_point() or leaf.is_complex():
                if _overlaps(made):  # each element of its memory once: torch does not write to what overlaps
                    made.new_empty(0).set_(made.untyped_storage()).normal_(0.0, scale)
                    return made
                return made.normal_(0.0, scale)
            return made.zero_()

    return pytree.tree_map(one, value)


@contextlib.contextmanager
def same_random_state(tensors: Any) -> Iterator[None]:
    """Restore the CPU's and the tensors' devices' random number generators on leaving."""
    devices = sorted({leaf.device.index or 0 for leaf in pytree.tree_leaves(tensors) if is_cuda(leaf)})
    with torch.random.fork_rng(devices=devices):
        yield


def is_cuda(leaf: Any) -> bool:
    """Whether the leaf is a tensor on a CUDA device."""
    return isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda"


def _overlaps(tensor: torch.Tensor) -> bool:
    return any(step == 0 and extent > 1 for step, extent in zip(tensor.stride(), tensor.shape, strict=True))
