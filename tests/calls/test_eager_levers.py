"""Models that cannot be captured, within budgets that take less than they are: modules of theirs are recomputed."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import memopt
from tests.training.steps import assert_equal, gradients, peak_of

pytestmark = pytest.mark.usefixtures("own_caches")


class Block(nn.Module):
    def __init__(self, width=16, norm=nn.LayerNorm, dropout=0.0):
        super().__init__()
        self.norm, self.first, self.second = norm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.scale = 1.0

    def forward(self, x):
        return x + self.dropout(self.second(F.gelu(self.first(self.norm(x))))) * self.scale


class Stack(nn.Module):
    """Not traced at all."""

    def __init__(self, block=Block, layers=5, width=16, **options):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([block(width, **options) for _ in range(layers)])

    @torch.compiler.disable
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Values(Stack):
    """How many blocks run goes by values."""

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            if x.abs().mean().item() > 100:
                break
        return x.square().mean()


class Packed(nn.Module):
    """Packed sequences through an LSTM, and a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.rnn = nn.Embedding(20, 8), nn.LSTM(8, 16, batch_first=True)
        self.head = nn.Sequential(*[Block() for _ in range(5)])

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(x), lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.head(hidden).square().mean()


class Convolutions(nn.Module):
    def __init__(self, inner, outer):
        super().__init__()
        self.first, self.second = nn.Conv2d(inner, outer, 3, padding=1), nn.Conv2d(outer, outer, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(outer), nn.BatchNorm2d(outer)])

    def forward(self, x):
        return self.norms[1](self.second(self.norms[0](self.first(x)).relu())).relu()


class UNet(nn.Module):
    """Two levels, several graphs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.down, self.middle, self.up = Convolutions(3, 8), Convolutions(8, 8), Convolutions(16, 8)

    def forward(self, x):
        first = self.down(x)
        torch._dynamo.graph_break()
        second = self.middle(F.max_pool2d(first, 2))
        torch._dynamo.graph_break()
        return self.up(torch.cat([F.interpolate(second, scale_factor=2), first], 1)).square().mean()


def rows():
    torch.manual_seed(1)
    return (torch.randn(64, 16),)


def tokens():
    torch.manual_seed(1)
    return torch.randint(0, 20, (8, 12)), torch.randint(3, 13, (8,))


def images():
    torch.manual_seed(1)
    return (torch.randn(2, 3, 16, 16),)


def trained(run, model, inputs, steps=3):
    """Losses, gradients, buffers and random numbers of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for number in range(steps):
        torch.manual_seed(number)
        loss = run(*inputs)
        loss.backward()
        found.append([loss.detach(), gradients(model), [b.clone() for b in model.buffers()], torch.rand(2)])
        optimizer.step()
        optimizer.zero_grad()
    return found


def eager_peak(model, inputs):
    model = copy.deepcopy(model)
    model(*inputs).backward()
    model.zero_grad()
    return peak_of(lambda: model(*inputs).backward(), model, *inputs)


@pytest.mark.quick("whole", "dropout", "batch-norm", "values", "packed")
@pytest.mark.parametrize(
    ("make", "inputs", "share"),
    [
        pytest.param(Stack, rows, 0.6, id="whole"),
        pytest.param(lambda: Stack(dropout=0.2), rows, 0.65, id="dropout"),
        pytest.param(lambda: Stack(norm=nn.BatchNorm1d, dropout=0.2), rows, 0.65, id="batch-norm"),
        pytest.param(Values, rows, 0.55, id="values"),
        pytest.param(Packed, tokens, 0.75, id="packed"),
        pytest.param(UNet, images, 0.75, id="unet"),
    ],
)
def test_the_budget_is_kept_with_eagers_numbers(make, inputs, share):
    model, given = make(), inputs()
    reference = copy.deepcopy(model)
    budget = int(share * eager_peak(model, given))
    run = memopt.compile(model, budget, backend="aten")
    assert_equal(trained(run, model, given), trained(reference, reference, given))
    assert_equal(list(model.state_dict().values()), list(reference.state_dict().values()))
    model.zero_grad()
    assert peak_of(lambda: run(*given).backward(), model, *given) <= run.report.peak_bytes <= budget
    assert run.report.unconstrained_bytes > budget
    if make in (Values, UNet):  # models of several graphs, whose own plan keeps it, modules as they are
        assert any(program.recomputed for program in run.report.programs)
    else:
        assert any("recomputed in backward" in note for note in run.report.notes)


@pytest.mark.quick("Stack-rows")
@pytest.mark.parametrize(("make", "inputs"), [(Stack, rows), (Packed, tokens)])
def test_the_minimum_that_is_named_is_kept(make, inputs):
    model, given = make(), inputs()
    with pytest.raises(memopt.BudgetError, match="recomputed in backward") as refused:
        memopt.compile(model, int(0.2 * eager_peak(model, given)), backend="aten")(*given)
    assert "\n" not in str(refused.value)
    model.zero_grad()
    least = refused.value.minimum_bytes
    run = memopt.compile(model, least, backend="aten")
    run(*given).backward()
    model.zero_grad()
    assert peak_of(lambda: run(*given).backward(), model, *given) <= least
    model.zero_grad()
    with pytest.raises(memopt.BudgetError):
        memopt.compile(model, int(0.97 * least), backend="aten")(*given)


def test_the_first_step_keeps_the_budget_and_hooks_run_once():
    model, (x,), seen = Stack(), *(rows(), [])
    budget = int(0.6 * eager_peak(model, (x,)))
    model.blocks[4].register_forward_hook(lambda module, given, made: seen.append(made))
    run = memopt.compile(model, budget, backend="aten")
    assert peak_of(lambda: run(x).backward(), model, x) - x.nbytes <= budget
    assert [type(made) for made in seen] == [torch.Tensor]


def tight(make=Stack, share=0.6):
    """A model, a copy of it, and the first within a budget that takes recomputation."""
    model, (x,) = make(), rows()
    run = memopt.compile(model, int(share * eager_peak(model, (x,))), backend="aten")
    return model, copy.deepcopy(model), run, x


def test_what_changes_between_forward_and_backward_is_as_it_was():
    def step(call, model):
        torch.manual_seed(0)
        loss = call(x)
        model.eval()
        for block in model.blocks:
            block.scale = 3.0
            block.requires_grad_(False)
            block.dropout.p = 0.9
        loss.backward()
        return gradients(model), torch.rand(2)

    model, reference, run, x = tight(lambda: Stack(dropout=0.2), 0.65)
    assert_equal(step(run, model), step(reference, reference))
    assert not model.training and model.blocks[0].scale == 3.0 and not model.blocks[0].first.weight.requires_grad


def test_weights_of_functional_call_are_those_that_are_recomputed_with():
    _, reference, run, x = tight()
    given = {name: (value.detach() * 1.5).requires_grad_() for name, value in reference.named_parameters()}
    wanted = torch.autograd.grad(functional_call(reference, given, (x,)), list(given.values()))
    loss = functional_call(run, given, (x,))
    assert_equal(torch.autograd.grad(loss, list(given.values())), wanted)


@pytest.mark.parametrize("change", ["weight", "data"])
def test_weights_that_change_before_backward_are_refused(change):
    model, _, run, x = tight()
    loss = run(x)
    with torch.no_grad():
        weight = model.blocks[0].first.weight
        (weight if change == "weight" else weight.data).mul_(2)
    with pytest.raises(RuntimeError, match=r"first\.weight.* changed between forward and backward, which recomputes"):
        loss.backward()


def test_several_backwards_of_a_kept_graph_and_second_derivatives():
    def step(call, model):
        loss = call(x)
        loss.backward(retain_graph=True)
        (2 * loss).backward(retain_graph=True)
        weights = [block.first.weight for block in model.blocks]
        first = torch.autograd.grad(loss, weights, create_graph=True)
        sum(value.square().sum() for value in first).backward()
        return gradients(model)

    model, reference, run, x = tight(lambda: Stack(norm=nn.BatchNorm1d), 0.65)
    assert_equal(step(run, model), step(reference, reference))
    assert_equal(list(model.buffers()), list(reference.buffers()))


class Counts(Block):
    """Counts, and keeps what it has made."""

    def __init__(self, width, **options):
        super().__init__(width, **options)
        self.calls, self.last = 0, None
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.seen = self.seen + x.detach().mean()
        self.last = super().forward(x)
        return self.last


def test_attributes_are_written_once():
    model, reference, run, x = tight(lambda: Stack(Counts), 0.8)
    assert_equal(trained(run, model, (x,)), trained(reference, reference, (x,)))
    assert any("recomputed" in note for note in run.report.notes)
    assert [block.calls for block in model.blocks] == [3] * len(model.blocks)
    assert model.blocks[0].last.grad_fn is not None


class Lists(Block):
    """Writes down what it has made."""

    def __init__(self, width, **options):
        super().__init__(width, **options)
        self.made = []

    def forward(self, x):
        self.made.append(float(x.detach().sum()))
        return super().forward(x)


class InPlace(Block):
    def forward(self, x):
        return super().forward(x.mul_(1.5) if x.requires_grad else x * 1.5)


def watch(model):
    model.seen = []
    for block in model.blocks:
        block.first.register_forward_hook(lambda *_: model.seen.append(1))
    return model


@pytest.mark.parametrize("make", [lambda: Stack(Lists), lambda: Stack(InPlace), lambda: watch(Stack())])
def test_modules_with_effects_of_their_own_are_left_alone(make):
    model, reference, run, x = tight(make, 0.8)
    wanted = trained(reference, reference, (x,))
    try:
        found = trained(run, model, (x,))
    except memopt.BudgetError:
        return
    assert_equal(found, wanted)
    assert getattr(model, "seen", None) in (None, [1] * 15)
    assert len(getattr(model.blocks[0], "made", [1] * 3)) == 3


def test_two_calls_before_backward():
    def step(call):
        torch.manual_seed(0)
        (call(x) + call(x + 1)).backward()

    model, (x,) = Stack(dropout=0.2), rows()
    reference = copy.deepcopy(model)
    step(reference)
    wanted = gradients(reference)
    reference.zero_grad()
    budget = int(0.6 * peak_of(lambda: step(reference), reference, x))
    run = memopt.compile(model, budget, backend="aten")
    with contextlib.suppress(memopt.BudgetError):  # the first step has one call, as far as is known
        step(run)
    model.zero_grad()
    step(run)
    assert_equal(gradients(model), wanted)
    model.zero_grad()
    assert peak_of(lambda: step(run), model, x) <= budget
