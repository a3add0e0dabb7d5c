"""Saved tensors that backward may write over."""

import types

import torch
from torch._functorch import config
from torch._guards import TracingContext, tracing

from memopt.torch_compat.donated import donated_now, may_donate, nothing_donated


def trained_twice(context):
    torch._dynamo.reset()
    x = torch.randn(4, requires_grad=True)
    with context:
        y = torch.compile(lambda x: x.sin().cos().sum(), backend="aot_eager")(x)
        y.backward(retain_graph=True)
        y.backward()
    return x.grad


def test_a_graph_may_be_kept_where_nothing_is_donated():
    with config.patch(donated_buffer=True):
        found = trained_twice(nothing_donated())
    assert found is not None


def test_the_setting_is_the_user_s_again_afterwards():
    with config.patch(donated_buffer=False):
        with may_donate():
            assert config.donated_buffer
        assert not config.donated_buffer


def test_the_list_is_the_one_of_the_backward_that_is_lowered():
    assert donated_now() == []
    context = TracingContext(None)
    with tracing(context):
        assert donated_now() == []
        context.fw_metadata = types.SimpleNamespace(bw_donated_idxs=[3])
        donated_now().clear()
        assert context.fw_metadata.bw_donated_idxs == []
