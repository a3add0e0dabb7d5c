"""What FSDP2 (`fully_shard`) makes, in the memory of the stream that computes; tried on 2.11 and 2.13.

What is allocated within a stream of CUDA's is cached for that stream alone. FSDP2 makes the shards of gradients within
the stream that reduces: dropped after the optimizer's step, they lie beside the next forward's activations instead of
giving room to these, and a step reserves all gradients beside its peak. What the root gathers comes in a stream of its
own as well, before anything runs that this could overlap with, and its memory serves nothing else as large.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from memopt.torch_compat.autograd_nodes import at_end_of_backward
from memopt.torch_compat.fully_sharded import groups_in, kept_root


def share_memory_with_activations(model: nn.Module) -> None:
    """Have gradients of the model's shards lie where activations were, in all groups whose reduction is torch's own.

    What the root gathers for good lies where activations will be.
    """
    for group in groups_in(model):
        kind = _kind()
        if type(group._reduce_scatter_comm) is kind.__base__:
            group._reduce_scatter_comm = kind(group)
    root = kept_root(model)
    if root is not None:
        root.unshard_async_op = True


@functools.cache
def _kind() -> Any:
    """The class of what reduces; made once FSDP2's own is imported."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    class ReduceBesideActivations(DefaultReduceScatter):
        """Torch's own, which is asked for memory twice: where backward runs for what is sent, then for what comes."""

        def __init__(self, group: Any) -> None:
            self._group = weakref.ref(group)
            self._computing: torch.cuda.Stream | None = None

        def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            group = self._group()
            plain = functools.partial(super().allocate, size, dtype=dtype, device=device)
            if device.type != "cuda" or group is None:
                return plain()
            here = torch.cuda.current_stream(device)
            if here != group.comm_ctx.reduce_scatter_stream:
                self._computing = here
                return plain()
            computing, self._computing = self._computing, None
            if computing is None or not stays_until_the_end(group, dtype):
                return plain()
            # The reducing stream has just been made to wait for all that the other one was given, so that nothing
            # reads what lay there; that one waits for it before backward ends, and until then the memory is held.
            with torch.cuda.stream(computing):
                shards = plain()
            at_end_of_backward(functools.partial(_drop, shards))
            return shards

    return ReduceBesideActivations


def stays_until_the_end(group: Any, dtype: torch.dtype) -> bool:
    """Whether what a group's gradients are reduced into becomes these gradients, which nothing reads within backward.

    Not where it is cast, added to earlier gradients, reduced once more, sent to the host or seen by hooks: all of that
    runs in other streams, and lets go of it there.

    Args:
        group: of parameters that FSDP2 gathers together.
        dtype: of what is reduced.
    """
    if group._all_reduce_hook is not None or group.mesh_info.replicate_mesh_dim is not None:
        return False
    for param in group.fsdp_params:
        shard = param.sharded_param
        if param.offload_to_cpu or param.orig_dtype != dtype or shard.grad is not None:
            return False
        if getattr(shard, "_post_accumulate_grad_hooks", None):
            return False
    return True


def _drop(_: torch.Tensor) -> None:
    """Hold a tensor until this is called."""
