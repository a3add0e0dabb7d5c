"""What is reached from what a model returns, and what a tensor is made of."""

import collections
import dataclasses
import types

import pytest
import torch
from torch import nn

from memopt.memory.reach import is_sparse, plain_tensors, shown_tensors, storages_of
from memopt.memory.resident import storage_bytes


@dataclasses.dataclass
class Holder:
    value: object


def test_tensors_of_objects_are_shown_in_order_and_once():
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    holder = Holder([b, types.SimpleNamespace(own=c, model=nn.Linear(1, 1))])
    holder.itself = holder
    outputs = (a, {"more": holder, "number": 3, "name": "x"}, a, None, collections.deque([b]))
    assert [id(tensor) for tensor in shown_tensors(outputs)] == [id(tensor) for tensor in (a, b, c)]
    assert shown_tensors(a) == [a] and shown_tensors(None) == []


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors_are_their_indices_and_values(layout):
    dense = torch.eye(6)
    sparse = dense.to_sparse(layout=layout)
    parts = list(plain_tensors(sparse))
    assert is_sparse(sparse) and not is_sparse(dense)
    assert storage_bytes([sparse, sparse]) == sum(part.untyped_storage().nbytes() for part in parts) > 0


def test_storages_are_shown_once_and_what_shows_none_is_left_out():
    x = torch.ones(8)
    found = storages_of([x, x[2:], torch.ones(2, 2).to_mkldnn(), torch.ones(3)])
    assert sorted(storage.nbytes() for storage in found.values()) == [12, 32]


def test_of_what_has_no_memory_there_is_no_allocated_storage():
    x = torch.ones(8)
    tensors = [x, x[2:], torch.ones(3, device="meta"), torch.ones(2, 2).to_sparse(), torch.empty(0)]
    assert {storage.nbytes() for storage in storages_of(tensors).values()} == {0, 12, 32}
    assert [storage.nbytes() for storage in storages_of(tensors, allocated=True).values()] == [32]
