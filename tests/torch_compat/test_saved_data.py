import torch
from torch import nn

from memopt.memory.live_tensors import alive, blocks_of, live_blocks
from memopt.torch_compat.saved_data import saved_behind
from memopt.torch_compat.storages import storage_id


def test_what_a_graph_has_saved_until_backward_releases_it():
    x, weight = torch.randn(3, 4), torch.randn(4, 5, requires_grad=True)
    y = (x @ weight).exp().sum()
    assert storage_id(x) in {storage_id(tensor) for tensor in saved_behind([y.grad_fn])}
    y.backward()
    assert list(saved_behind([y.grad_fn])) == []


def test_no_hook_is_run():
    packed = []

    def pack(value):
        packed.append(value.clone())
        return packed[-1]

    def unpack(value):
        raise AssertionError

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = torch.randn(3, requires_grad=True).exp()
    assert {storage_id(tensor) for tensor in saved_behind([y.grad_fn])} == {storage_id(packed[0])}


def test_live_blocks_are_those_of_tensors_gradients_and_graphs():
    layer, x = nn.Linear(3, 2), torch.randn(5, 3)
    hidden = x + 1
    key = storage_id(hidden)
    y = layer(hidden).sum()
    del hidden
    found = live_blocks(torch.device("cpu"))
    assert key in found and storage_id(x) in found
    y.backward()
    assert storage_id(layer.weight.grad) in live_blocks(torch.device("cpu"))
    assert key not in alive(found)


def test_fake_tensors_have_no_blocks():
    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(3)
    assert blocks_of([fake], torch.device("cpu")) == {}
