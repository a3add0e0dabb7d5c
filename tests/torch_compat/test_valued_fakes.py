"""Fake tensors that know where their values come from."""

import pytest
import torch

from memopt.torch_compat.valued_fakes import UNKNOWN_VALUE, ValuedFakeMode, is_unknown, written_by


def known(value):
    mode = ValuedFakeMode()
    fake = mode.from_tensor(value)
    mode.know(fake, value)
    return mode, fake


def test_nothing_is_computed_until_a_value_is_asked_for():
    mode, x = known(torch.tensor([3.0, -1.0]))
    with mode:
        y = (x * 2).sum()
        assert not mode.answered
        assert y.item() == 4.0 and f"{y:.1f}" == "4.0" and bool((x > 0).any())
        assert tuple(x.nonzero().shape) == (2, 1) and tuple(x.clamp(min=0).nonzero().shape) == (1, 1)
    assert mode.answered and not mode.by_chance and not mode.strays


def test_a_single_number_is_asked_for_as_others_are():
    mode, count = known(torch.tensor(3))
    with mode:
        assert int(count) == 3
    assert mode.answered


def test_what_was_written_to_is_known_where_nothing_shares_it():
    mode, x = known(torch.tensor([3.0, -1.0]))
    with mode:
        y = x.clone()
        y.add_(1)
        assert y.sum().item() == 4.0
        view = y[:1]
        view.zero_()
        with pytest.raises(UNKNOWN_VALUE):
            y.sum().item()
    assert x.fake_mode is mode


def test_an_unknown_value_is_no_answer():
    mode = ValuedFakeMode()
    x = mode.without_value(torch.empty(2, 3, device="meta").t())
    assert (tuple(x.shape), x.stride(), x.device.type) == ((3, 2), (1, 3), "cpu")
    with mode, pytest.raises(UNKNOWN_VALUE) as error:
        x.sum().item()
    assert is_unknown(error.value) and not is_unknown(ValueError("no data")) and not is_unknown(None)
    assert is_unknown(RuntimeError("cannot: its data is not allocated yet"))


def test_what_is_drawn_is_by_chance_and_what_is_trained_is_a_stray():
    mode, x = known(torch.ones(4))
    before = torch.get_rng_state()
    with mode:
        assert 0 <= torch.rand_like(x).mean().item() <= 1
    assert mode.by_chance and torch.equal(torch.get_rng_state(), before)
    weight = torch.nn.Parameter(torch.ones(4))
    with mode:
        assert (x * weight).sum().item() == 4.0
    assert mode.strays


def test_what_an_operator_writes_to_is_told_with_the_statistics_of_batch_norms():
    x, mean, var = torch.randn(4, 3), torch.zeros(3), torch.ones(3)
    arguments = (x, None, None, mean, var, True, 0.1, 1e-5)
    assert [id(value) for value in written_by(torch.ops.aten.native_batch_norm.default, arguments, {})] == [
        id(mean),
        id(var),
    ]
    assert [id(value) for value in written_by(torch.ops.aten.add_.Tensor, (x, mean), {})] == [id(x)]
    assert list(written_by(torch.ops.aten.add.Tensor, (x, mean), {})) == []
