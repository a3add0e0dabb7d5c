from __future__ import annotations

import pytest
import torch

from memopt.torch_compat import storages


def test_views_share_a_number_and_copies_do_not() -> None:
    x = torch.zeros(4)
    assert storages.storage_id(x) == storages.storage_id(x[1:]) == storages.id_of_storage(x.untyped_storage())
    assert storages.storage_id(x) != storages.storage_id(x.clone())


def test_who_holds_a_storage_is_counted() -> None:
    x = torch.zeros(4)
    storage = x.untyped_storage()
    alone = storages.storage_users(storage)
    view = x.detach()
    assert storages.storage_users(storage) == alone + 1
    del view
    assert storages.storage_users(storage) == alone


def test_writes_are_counted_for_all_views() -> None:
    x = torch.zeros(4)
    before = storages.version_of(x)
    x[1:].add_(1)
    assert storages.version_of(x) == before + 1 == storages.version_of(x[:2])
    with torch.inference_mode():
        uncounted = torch.zeros(1)
    with pytest.raises(RuntimeError, match="version counter"):
        storages.version_of(uncounted)


def test_autograd_knows_of_its_views() -> None:
    x = torch.zeros(4, requires_grad=True).clone()
    assert storages.is_tracked_view(x[1:]) and not storages.is_tracked_view(x)


def test_moved_tensors_are_found_out_either_way() -> None:
    values = [torch.zeros(2), torch.zeros(2)]
    places = [value.data_ptr() for value in values]
    for same in (storages.same_places, storages._one_by_one):
        assert same(values, places, [0, 1])
        assert not same([values[0], torch.zeros(2)], places, [0, 1])
        assert same([values[0], torch.zeros(2)], places, [0])
