"""What stands for torch's functions that look at values gives eager's numbers, in one graph."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import transformer

import memopt

_SHAPE = {"d_model": 32, "nhead": 4, "dim_feedforward": 64, "dropout": 0.0, "batch_first": True}


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = nn.Transformer(num_encoder_layers=1, num_decoder_layers=1, **_SHAPE)

    def forward(self, source, target, mask):
        return self.transformer(source, target, tgt_mask=mask)


class Encoder(nn.Module):
    def __init__(self, norm=None, **options):
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**_SHAPE), 2, norm=norm, **options)

    def forward(self, source, padding=None, mask=None):
        return self.encoder(source, src_key_padding_mask=padding, mask=mask)


def _lengths(*lengths):
    return torch.arange(12)[None] >= torch.tensor(lengths)[:, None]


_SOURCE = torch.randn(3, 12, 32, generator=torch.Generator().manual_seed(0))
_CAUSAL = nn.Transformer.generate_square_subsequent_mask(12)
_BAND = torch.full((12, 12), float("-inf")).triu(3)
_SPLIT = _lengths(12, 5, 8) ^ (torch.arange(12) == 2)  # what is no padding does not lie together


def _same(model, budget, calls):
    """The same numbers as eager for each of the calls, which differ in values alone; nothing runs outside of graphs."""
    torch._dynamo.reset()
    compiled = memopt.compile(model, budget, backend="aten")
    for args in calls:
        expected, got = [], []
        for run, results in ((model, expected), (compiled, got)):
            model.zero_grad()
            outputs = run(*args)
            results.append(outputs)
            if torch.is_grad_enabled():
                outputs.pow(2).mean().backward()
                results += [parameter.grad for parameter in model.parameters()]
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
    assert not [note for note in compiled.report.notes if "outside" in note]


@pytest.mark.quick("1GB-False", "None-True")
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("budget", [None, "1GB"])
def test_a_mask_is_applied_whether_it_is_causal_or_not(budget, train):
    with torch.set_grad_enabled(train):
        calls = [(_SOURCE, _SOURCE, _CAUSAL), (_SOURCE, _SOURCE, _BAND)]
        _same(Translator().train(train), budget, calls)


@pytest.mark.parametrize("train", [True, False])
def test_an_encoder_with_a_mask_is_one_graph(train):
    with torch.set_grad_enabled(train):
        _same(Encoder().train(train), 1.0, [(_SOURCE, None, _CAUSAL), (_SOURCE, None, _BAND)])


@pytest.mark.quick("True-plain", "False-norm", "True-unnested")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "options",
    [{}, {"norm": nn.LayerNorm(32)}, {"enable_nested_tensor": False}],
    ids=["plain", "norm", "unnested"],
)
@pytest.mark.parametrize("train", [True, False])
def test_padding_that_eager_leaves_out_is_zero(train, options):
    with torch.set_grad_enabled(train):
        calls = [(_SOURCE, _lengths(12, 5, 8)), (_SOURCE, _lengths(3, 5, 8)), (_SOURCE, _SPLIT)]
        _same(Encoder(**options).train(train), None, calls)


class Checked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        torch._check_tensor_all(x < 100)
        return self.linear(x)


@pytest.mark.parametrize("backend", ["aten", "static"])
def test_a_check_is_part_of_the_graph(backend):
    torch._dynamo.reset()
    compiled = memopt.compile(Checked().eval(), backend=backend)
    with torch.no_grad():
        compiled(torch.randn(2, 8))
        with pytest.raises(RuntimeError, match="Expected cond"):
            compiled(torch.full((2, 8), 200.0))


def _norms(**options):
    return nn.Sequential(
        nn.Conv1d(3, 6, 3), nn.BatchNorm1d(6, momentum=None, **options), nn.ReLU(), nn.Flatten(),
        nn.Linear(60, 5), nn.BatchNorm1d(5, momentum=None), nn.BatchNorm1d(5),
    )  # fmt: skip


@pytest.mark.parametrize("budget", [None, "1GB"])
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}], ids=str)
def test_batch_norms_with_a_cumulative_average_are_one_graph(options, budget):
    torch._dynamo.reset()
    eager = _norms(**options)
    model = copy.deepcopy(eager)
    compiled = memopt.compile(model, budget, backend="aten")
    for step in range(3):
        x = torch.randn(4, 3, 12) * (1 + step)
        for call, owner in ((eager, eager), (compiled, model)):
            owner.zero_grad()
            call(x).pow(2).mean().backward()
    assert not compiled.report.notes and len(compiled.report.programs) == 1
    gradients = [[parameter.grad for parameter in each.parameters()] for each in (model, eager)]
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(model.state_dict(), eager.state_dict(), atol=1e-6, rtol=1e-5)


def test_a_cumulative_average_of_half_the_precision_is_divided_in_single():
    torch._dynamo.reset()
    eager = nn.BatchNorm1d(4, momentum=None).bfloat16()
    eager.num_batches_tracked.fill_(300)
    eager.running_mean.fill_(1.0)
    model = copy.deepcopy(eager)
    compiled = memopt.compile(model, backend="aten")
    x = torch.randn(8, 4, dtype=torch.bfloat16) + 100
    eager(x)
    compiled(x).float().sum().backward()
    torch.testing.assert_close(model.state_dict(), eager.state_dict())


def test_eager_is_as_it_was():
    assert transformer._detect_is_causal_mask(_CAUSAL, None, 12) is True


class Normed(nn.Module):
    """Batch norms of what is not contiguous, and a view of one that there is because it is contiguous itself."""

    def __init__(self, kind, channels):
        super().__init__()
        self.norm = kind(channels)
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, channels))

    def forward(self, x):
        y = self.norm(x.transpose(-1, -2))
        z = nn.functional.batch_norm(x.transpose(0, -1), None, None, training=True)
        flat = y.view(-1) if y.is_contiguous() else y.reshape(-1)
        return flat.sin(), z, torch.batch_norm(z.mT.mT, None, None, None, None, True, 0.1, 1e-5, False), y


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    ("kind", "shape"), [(nn.BatchNorm1d, (4, 5, 3)), (nn.BatchNorm2d, (2, 3, 5, 4)), (nn.BatchNorm3d, (2, 3, 4, 5, 2))]
)
def test_batch_norms_lie_as_on_a_cpu(kind, shape, train):
    """Results are contiguous, or channels last, whatever is normed."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    x = torch.randn(shape)
    if len(shape) > 3:
        x = x.transpose(-1, -2).contiguous(memory_format=[torch.channels_last, torch.channels_last_3d][len(shape) - 4])
        x = x.transpose(-1, -2)
    model = Normed(kind, x.transpose(-1, -2).shape[1]).train(train)
    copy = Normed(kind, x.transpose(-1, -2).shape[1]).train(train)
    compiled = memopt.compile(copy, backend="aten", verify=True)
    for _ in range(3):
        expected, got = ([run(x * 2), run(x)][-1] for run in (model, compiled))
        torch.testing.assert_close(got, expected)
        assert [y.stride() for y in got] == [y.stride() for y in expected]
        for outputs in (expected, got):
            sum(output.square().mean() for output in outputs if output.requires_grad).backward()
    torch.testing.assert_close(dict(copy.state_dict()), dict(model.state_dict()))
    torch.testing.assert_close([p.grad for p in copy.parameters()], [p.grad for p in model.parameters()])
    assert not [note for note in compiled.report.notes if "outside" in note]


class Leaky(nn.Module):
    def __init__(self, call):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.call = nn.Linear(6, 6), call

    def forward(self, x):
        return self.call(self.linear(x).t())


@pytest.mark.parametrize(
    "call",
    [
        lambda y: functional.rrelu(y, training=True),
        lambda y: nn.RReLU()(y),
        lambda y: torch.rrelu(y, 0.1, 0.3, True),
        lambda y: functional.rrelu_(y * 1, training=True),
        lambda y: functional.rrelu(y * 1, training=True, inplace=True),
        lambda y: functional.rrelu(y, training=False),
    ],
    ids=["function", "module", "torch", "in_place", "asked_in_place", "inference"],
)
def test_a_leaky_relu_that_draws_lies_as_in_eager(call):
    torch._dynamo.reset()
    model, x, found = Leaky(call), torch.randn(4, 6), []
    for run in (model, memopt.compile(model, backend="aten")):
        torch.manual_seed(3)
        model.zero_grad()
        y = run(x)
        y.sin().sum().backward()
        found.append([y, model.linear.weight.grad])
    torch.testing.assert_close(found[1], found[0])
    assert found[1][0].stride() == found[0][0].stride()
