"""Tensors without values."""

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from memopt.torch_compat.fake_tensors import FakeTensor, FakeTensorMode, has_symbols, is_dense, no_fake_mode


def test_what_is_made_within_a_mode_is_real_where_that_is_asked():
    with FakeTensorMode():
        assert isinstance(torch.ones(2), FakeTensor)
        with no_fake_mode():
            assert torch.ones(2).sum().item() == 2


def test_sizes_that_are_symbols():
    mode = FakeTensorMode(shape_env=ShapeEnv())
    assert has_symbols(mode.from_tensor(torch.ones(3, 4)))
    assert not has_symbols(mode.from_tensor(torch.ones(3, 4), static_shapes=True)) and not has_symbols(torch.ones(3))


def test_elements_that_each_lie_once():
    x = torch.ones(3, 4)
    assert is_dense(x) and is_dense(x.t()) and not is_dense(x[:, ::2]) and not is_dense(x[:1].expand(3, 4))
