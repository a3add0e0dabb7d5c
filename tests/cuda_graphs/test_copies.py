from __future__ import annotations

import gc

import torch

from memopt.cuda_graphs.aliases import address_of, seen
from memopt.cuda_graphs.copies import copies_of, copy, like, unheld


def test_what_stands_for_tensors_lies_where_they_do_and_does_not_hold_them():
    first, kept = torch.arange(6.0).reshape(2, 3), torch.ones(2)
    made = unheld([first, first.t(), kept, 5], {address_of(kept)})
    assert torch.equal(made[0], first) and torch.equal(made[1], first.t())
    assert made[2] is kept and made[3] == 5
    assert address_of(made[0]) == address_of(made[1]) == address_of(first)
    storage = seen(first.untyped_storage())
    del first
    gc.collect()
    assert storage.expired()


def test_copies_lie_apart_as_what_they_are_of():
    value = torch.arange(6.0).reshape(2, 3).t()
    made = copy(value)
    assert torch.equal(made, value) and made.stride() == value.stride() and address_of(made) != address_of(value)
    assert like(value).stride() == value.stride()


def test_copies_of_several_leave_what_is_no_tensor():
    values = [torch.ones(2), None, torch.zeros(3)]
    made = copies_of(values)
    assert made[1] is None and all(torch.equal(made[i], values[i]) and made[i] is not values[i] for i in (0, 2))
    assert copies_of([1, None]) == [1, None]
