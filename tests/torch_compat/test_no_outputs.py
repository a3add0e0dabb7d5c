import pytest
import torch

from memopt.torch_compat.no_outputs import none_has_no_gradient


class Split(torch.autograd.Function):
    """Gives no second output where none is asked for; its backward asks for strides."""

    @staticmethod
    def forward(ctx, x, second):
        ctx.set_materialize_grads(False)
        ctx.second = second
        return x.sin(), x.cos() if second else None

    @staticmethod
    def backward(ctx, one, other):
        assert (other is not None) == ctx.second
        found = one if one.stride(0) else one * 2
        return found if other is None else found + other, None


def both(x, second):
    one, other = Split.apply(x, second)
    return one if other is None else one + other


@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be instantiated")
@pytest.mark.parametrize("second", [True, False])
def test_an_output_that_is_none_has_no_gradient(second):
    torch._dynamo.reset()
    x = torch.randn(4, 3, requires_grad=True)
    (expected,) = torch.autograd.grad(both(x, second).square().sum(), x)
    with none_has_no_gradient():
        out = torch.compile(both, backend="aot_eager", fullgraph=True)(x, second)
    (found,) = torch.autograd.grad(out.square().sum(), x)
    torch.testing.assert_close(found, expected)
