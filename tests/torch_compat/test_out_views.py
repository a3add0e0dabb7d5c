import pytest
import torch
from torch import nn
from torch._dynamo.exc import TorchRuntimeError, Unsupported

import memopt
from memopt.module import calls_of
from memopt.torch_compat.out_views import out_views_copied


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def views(rows, columns, **options):
    return torch.zeros(rows, 3 * columns, **options)[:, columns : 2 * columns]


def product(a, b, out):
    return torch.mm(a, b, out=out), out + 1


def negated(a, b, out):
    return torch.neg(a @ b, out=out).mul_(2), out


def joined(a, b, out):
    return torch.cat([a[:2], b[:2, :4]], 1, out=out[:2]).sum(), out


def solved(a, b, out):
    return torch.linalg.matmul(a, b, out=out), torch.ops.aten.add(a @ b, 1, out=out), out


def ordered(a, b, out):
    places = torch.zeros(out.shape[1], out.shape[0], dtype=torch.int64).t()
    found = torch.sort(a @ b, dim=1, out=(out, places))
    return found.values.add_(1), found[1], out, places


def to_the_left(a, b, out):
    return torch.triu(a @ b, out=out.t().flip(0).flip(0).t()), out


@pytest.mark.parametrize("function", [product, negated, joined, solved, ordered, to_the_left])
def test_what_is_written_to_a_view_with_gaps_is_in_the_graph(function):
    a, b = torch.randn(4, 5), torch.randn(5, 9)
    one, other = views(4, 9), views(4, 9)
    expected = function(a, b, one)
    with out_views_copied():
        found = compiled(function)(a, b, other)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(other._base, one._base, rtol=0, atol=0)


def test_the_view_itself_is_returned():
    def written(a, b, out):
        torch.mm(a, b, out=out).add_(1)
        return out * 1

    a, b = torch.randn(4, 5), torch.randn(5, 9)
    with out_views_copied():
        found = compiled(written)(a, b, views(4, 9))
    torch.testing.assert_close(found, a @ b + 1)


def converted(a, b, out):
    return torch.add(a, b, out=out)


def drawn(a, b, out):
    return torch.bernoulli(a.abs().clamp(max=1), out=out)


def made(a, b, out):
    return torch.ones(out.shape, out=out)


def within(a, b, out):
    return torch.add(out[:, :1], a, out=out)


LEFT = {
    "converted": (converted, torch.float64, False),
    "differentiated": (converted, torch.float32, True),
    "drawn": (drawn, torch.float32, False),
    "made of nothing": (made, torch.float32, False),
    "overlapping": (within, torch.float32, False),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_eager_does_otherwise_is_left_to_it(case):
    function, dtype, trained = LEFT[case]
    a, b = torch.randn(4, 9, requires_grad=trained), torch.randn(4, 9)
    refused = pytest.raises((Unsupported, TorchRuntimeError), match=r"non-contiguous|automatic differentiation")
    with out_views_copied(), refused:
        compiled(function)(a, b, views(4, 9, dtype=dtype))


def test_elsewhere_tracing_is_as_ever():
    with pytest.raises(Unsupported, match="non-contiguous"):
        compiled(product)(torch.randn(4, 5), torch.randn(5, 9), views(4, 9))


class Tiled(torch.autograd.Function):
    """A product by tiles of its columns, each in a buffer that is used again."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        buffer, found = x.new_empty(len(x), 8), x.new_zeros(len(x))
        for start in range(0, len(weight), 8):
            part = weight[start : start + 8]
            tile = buffer[:, : len(part)]
            torch.mm(x, part.t(), out=tile)
            found += tile.sin_().sum(1)
        return found

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        buffer, of_x, of_weight = x.new_empty(len(x), 8), torch.zeros_like(x), torch.zeros_like(weight)
        for start in range(0, len(weight), 8):
            part = weight[start : start + 8]
            tile = buffer[:, : len(part)]
            torch.mm(x, part.t(), out=tile)
            tile.cos_().mul_(gradient[:, None])
            of_x.addmm_(tile, part)
            of_weight[start : start + 8] += tile.t() @ x
        return of_x, of_weight


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
        self.head = nn.Linear(16, 20, bias=False)

    def forward(self, x):
        for layer in self.body:
            x = torch.tanh(layer(x))
        return Tiled.apply(x, self.head.weight).square().mean()


@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be instantiated")
@pytest.mark.parametrize("engine", ["aten", "inductor"])
def test_a_loss_by_tiles_trains_within_a_budget_as_eager_does(engine):
    torch.manual_seed(0)
    model, x = Net(), torch.randn(256, 16)
    expected = torch.autograd.grad(model(x), list(model.parameters()))
    call = memopt.compile(model, 0.8, backend=engine)
    call(x).backward()
    assert calls_of(call).sessions.graphs == 1
    torch.testing.assert_close([each.grad for each in model.parameters()], list(expected))
