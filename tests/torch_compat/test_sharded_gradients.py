"""Where FSDP2 has reduced gradients: which groups' may lie where activations were, and that they are the same there."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from memopt.torch_compat.fully_sharded import groups_in
from memopt.torch_compat.sharded_gradients import share_memory_with_activations, stays_until_the_end
from tests.torch_compat.test_fully_sharded import sharded

__all__ = ["sharded"]
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")


def test_each_group_reduces_as_before_and_what_a_user_has_set_is_left_alone(sharded):
    own = SimpleNamespace()
    first, *others = groups_in(sharded)
    first._reduce_scatter_comm, torchs = own, others[0]._reduce_scatter_comm
    share_memory_with_activations(sharded)
    made = [group._reduce_scatter_comm for group in others]
    assert first._reduce_scatter_comm is own and all(isinstance(comm, type(torchs)) for comm in made)
    share_memory_with_activations(sharded)
    assert [group._reduce_scatter_comm for group in others] == made and len(set(map(id, made))) == len(made)


def test_what_the_root_keeps_comes_in_the_stream_that_computes_and_blocks_overlap_as_before(sharded):
    share_memory_with_activations(sharded)
    assert [group.unshard_async_op for group in groups_in(sharded)] == [True, False, False, False, False]
    sharded(torch.randn(4, 32)).backward()


def test_on_a_cpu_gradients_are_what_they_were(sharded):
    x = torch.randn(4, 32)
    sharded(x).backward()
    expected = [parameter.grad.to_local().clone() for parameter in sharded.parameters()]
    sharded.zero_grad()
    share_memory_with_activations(sharded)
    sharded(x).backward()
    torch.testing.assert_close([parameter.grad.to_local() for parameter in sharded.parameters()], expected)


def test_only_what_becomes_the_gradients_themselves_lies_there(sharded):
    sharded(torch.randn(4, 32)).backward()
    sharded.zero_grad()
    group = groups_in(sharded)[1]
    assert stays_until_the_end(group, torch.float32)
    assert not stays_until_the_end(group, torch.bfloat16), "it is cast to the shards' own type"
    group._all_reduce_hook = print
    assert not stays_until_the_end(group, torch.float32)
    group._all_reduce_hook, mesh = None, group.mesh_info
    group.mesh_info = dataclasses.replace(mesh, replicate_mesh_dim=0)
    assert not stays_until_the_end(group, torch.float32), "it is reduced once more, over replicas"
    group.mesh_info = mesh
    param = group.fsdp_params[0]
    param.offload_to_cpu = True
    assert not stays_until_the_end(group, torch.float32)
    param.offload_to_cpu = False
    hook = param.sharded_param.register_post_accumulate_grad_hook(lambda _: None)
    assert not stays_until_the_end(group, torch.float32), "the hook may drop it within backward"
    hook.remove()
    assert stays_until_the_end(group, torch.float32)
    sharded(torch.randn(4, 32)).backward()
    assert not stays_until_the_end(group, torch.float32), "it is added to the first"


def wide(device: torch.device) -> nn.Module:
    """Blocks of 64 MiB each, sharded over one process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(6))).to(device)
    mesh = init_device_mesh("cuda", (1,))
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.mark.gpu
def test_on_a_gpu_the_stream_that_reduces_caches_nothing_and_gradients_are_the_same_to_the_bit(tmp_path):
    torch.distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        device = torch.device("cuda", torch.cuda.current_device())
        found, cached = [], []
        for changed in (False, True):
            torch.cuda.empty_cache()
            model, x = wide(device), torch.randn(512, 4096, device=device)
            if changed:
                share_memory_with_activations(model)
            for calls in (1, 2, 1, 1):  # the second of two is added to the first
                for _ in range(calls):
                    model(x).square().mean().backward()
                found.append([parameter.grad.to_local().clone() for parameter in model.parameters()])
                model.zero_grad()
            reducing = groups_in(model)[1].comm_ctx.reduce_scatter_stream.cuda_stream
            pools = [item for item in torch.cuda.memory_snapshot() if item["stream"] == reducing]
            cached.append(sum(item["total_size"] for item in pools))
            del model
        torch.testing.assert_close(found[4:], found[:4], rtol=0, atol=0)
        assert cached[0] >= 6 * 64 * 2**20 > cached[1]
    finally:
        torch.distributed.destroy_process_group()
