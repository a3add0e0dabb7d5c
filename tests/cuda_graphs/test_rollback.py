"""What is kept of tensors that are written over."""

import torch

from memopt.cuda_graphs.rollback import _MOST, Rollback, can_be_put_back


def test_all_kinds_of_tensors_hold_again_what_they_held_and_nobody_sees_that():
    mean, count = torch.arange(6.0).reshape(2, 3), torch.tensor(7)
    strided = torch.arange(6.0).reshape(2, 3).t()
    tensors = [mean, count, strided, torch.zeros(0)]
    kept, before, versions = Rollback(tensors), [value.clone() for value in tensors], []
    for _ in range(2):
        kept.keep()
        for value in tensors:
            value.add_(1)
        versions = [value._version for value in tensors]
        kept.put_back()
        assert all(torch.equal(value, known) for value, known in zip(tensors, before, strict=True))
    assert [value._version for value in tensors] == versions


def test_nothing_is_kept_of_nothing():
    kept = Rollback([])
    kept.keep()
    kept.put_back()


def test_much_is_not_kept_nor_what_must_not_be_written_to():
    half = torch.empty(_MOST // 2, dtype=torch.uint8)
    assert can_be_put_back([]) and can_be_put_back([half, half.clone()])
    assert not can_be_put_back([half, half.clone(), torch.zeros(1)])
    with torch.inference_mode():
        assert not can_be_put_back([torch.zeros(1)])
