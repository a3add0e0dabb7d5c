from __future__ import annotations

import pytest
import torch

from memopt.capture.shadow import Shadow, model_names
from memopt.memory.distributed import gathered_bytes, groups_of, sent_in_blocks_bytes, sent_last_bytes
from memopt.memory.reach import plain_tensors
from memopt.memory.resident import storage_bytes
from memopt.program import InputKind
from memopt.torch_compat.fully_sharded import groups, is_sharded, let_go
from tests.training.test_fsdp import Net

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")


@pytest.fixture
def sharded(tmp_path):
    """A model that is sharded over one process: blocks, then the root, in bf16."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    model, policy = Net(), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    yield fully_shard(model, mesh=mesh, mp_policy=policy)
    torch.distributed.destroy_process_group()


def test_what_is_gathered_is_known_before_the_first_call_and_what_it_became_after_it(sharded):
    assert is_sharded(sharded) and not is_sharded(Net())
    found = list(groups(sharded))
    assert [stays for _, stays in found] == [True, *[False] * 4], "the root's parameters stay whole until backward"
    root, first, *_ = (group for group, _ in found)
    assert [tuple(each.shape) for each in root] == [(8, 32), (8,)]
    assert all(each.dtype is torch.bfloat16 and each.whole is None for each in first)
    assert sum(each.sent_bytes for each in first) == 2 * sum(each.whole_bytes for each in first)
    sharded(torch.randn(4, 32)).backward()
    _, (first, _), *_ = groups(sharded)
    names = model_names(sharded)
    for each in first:
        known = names[id(each.whole)]
        assert known.kind is InputKind.PARAMETER and known.name == each.name
        assert known.left_bytes == storage_bytes([each.shard])


def test_a_twin_has_whole_parameters_and_gathers_nothing(sharded):
    shadow = Shadow(sharded)
    (fake,), _ = shadow.inputs((torch.randn(4, 32),), {})
    with shadow.mode:
        shadow.model(fake).backward()
    assert shadow.model.blocks[0].up.weight.shape == (128, 32)
    assert shadow.model.blocks[0].up.weight.dtype is torch.bfloat16
    assert all(each.whole is None for group, _ in groups(sharded) for each in group)
    left = {known.name: known.left_bytes for known in shadow.names.values()}
    assert left["head.weight"] == 8 * 32 * 2, "the gradients of what stays whole are sent in the end"
    assert left["blocks.0.up.weight"] == 128 * 32 * 4


def test_a_forward_that_was_broken_off_is_begun_anew(sharded):
    x, expected = torch.randn(4, 32), Net()
    handle = sharded.blocks[1].up.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sharded(x)
    handle.remove()
    let_go(sharded)
    let_go(sharded)  # there is nothing to be done
    assert all(hasattr(parameter, "device_mesh") for parameter in sharded.parameters())
    assert sharded(x).item() == pytest.approx(expected(x).item(), rel=0.05)


def test_shards_are_counted_and_what_is_gathered_beside(sharded):
    shards = [part for parameter in sharded.parameters() for part in plain_tensors(parameter)]
    assert storage_bytes(list(sharded.parameters())) == sum(part.nbytes for part in shards)
    (root, _), (block, _), *_ = groups(sharded)
    kept, whole = sum(each.whole_bytes for each in root), sum(each.whole_bytes for each in block)
    assert gathered_bytes(sharded) == kept + 2 * whole + whole + 2 * whole
    sent, shard = sum(each.sent_bytes for each in root), sum(each.shard.to_local().nbytes for each in root)
    assert sent_last_bytes(sharded) == sent - min(kept, shard) > 0
    assert sent_in_blocks_bytes(sharded) == sent + shard
    assert sent_last_bytes(Net()) == 0 and sent_in_blocks_bytes(Net()) == 0
    assert gathered_bytes(Net()) == 0
    assert len(groups_of(sharded)) == 1 and groups_of(Net()) == []
