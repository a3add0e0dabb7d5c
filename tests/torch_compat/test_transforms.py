"""What is in force around a call is known by the name that the user knows it by."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from memopt.torch_compat.transforms import compiled_from, in_force, is_transformed, transforms_left


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def within(transform):
    """What is in force within a transform of a function, and after it."""
    said = []

    def function(x):
        said.append(in_force())
        return (x * 2).sum()

    transform(function)
    return said[0], in_force()


def dual(function):
    with forward_ad.dual_level():
        function(torch.ones(2))


def in_mode(function):
    with Mode():
        function(torch.ones(2))


@pytest.mark.parametrize(
    ("transform", "name"),
    [
        (lambda f: torch.func.grad(f)(torch.ones(2)), "torch.func"),
        (lambda f: torch.vmap(f)(torch.ones(2, 2)), "torch.func"),
        (dual, "forward-mode differentiation"),
        (lambda f: make_fx(f)(torch.ones(2)), "make_fx"),
        (in_mode, "a TorchDispatchMode"),
    ],
    ids=["grad", "vmap", "dual", "make_fx", "mode"],
)
def test_what_is_in_force_is_named_and_over_afterwards(transform, name):
    inside, after = within(transform)
    assert name in inside and after == ""


def test_nothing_is_in_force_in_a_plain_call():
    assert within(lambda f: f(torch.ones(2))) == ("", "")


def test_what_a_module_was_compiled_from():
    model = nn.Linear(2, 2)
    assert compiled_from(torch.compile(model)) is model
    assert compiled_from(model) is None and compiled_from(torch.compile(torch.relu)) is None


def test_tensors_of_a_transform_are_known():
    said = []
    torch.vmap(lambda x: (said.append(is_transformed(x)), x)[1])(torch.ones(2))
    assert said == [True] and not is_transformed(torch.ones(2))


def test_what_a_failing_graph_has_entered_is_left():
    functorch = torch._C._functorch

    def graph():
        functorch._grad_increment_nesting()
        functorch._vmap_increment_nesting(2, "error")
        torch._C._enter_dual_level()
        functorch._jvp_increment_nesting()
        functorch._func_increment_nesting(True)
        raise ValueError("a call")

    with pytest.raises(ValueError, match="a call"), transforms_left():
        graph()
    assert in_force() == ""
    with forward_ad.dual_level():  # no level is open
        pass
