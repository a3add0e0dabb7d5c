"""What is resident in the calls of one model."""

import gc

import pytest
import torch
from torch import nn

import memopt
from memopt.calls.guard_fast_path import Kind


def test_gradients_and_optimizers_are_counted_by_kind_of_call():
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    run = memopt.compile(model, "1GB", backend="aten", optimizer=torch.optim.Adam(model.parameters()))
    residents, weights = run._memopt.residents, sum(p.nbytes for p in model.parameters())
    residents.count_optimizers()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    plain, added = (residents.of((x,), {}, Kind(True, accumulating)) for accumulating in (False, True))
    assert (plain.parameters, plain.inputs, plain.gradients) == (weights, x.nbytes, 0)
    assert added.gradients == weights
    assert plain.optimizer_state >= 2 * weights


def test_inference_before_backward_counts_what_the_loop_has_made():
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    run = memopt.compile(model, "1GB", backend="aten")
    first = torch.cat([run(x)] * 64)
    with torch.no_grad():
        run(x)
    assert run._memopt.residents.of((x,), {}, Kind(False, False, beside=True)).outside >= first.nbytes
    first.mean().backward()


class Keeps(nn.Module):
    """A model with a table that is no buffer, a state of the call before, and one that hooks of the user's keep."""

    def __init__(self, table=0, state=0, kept=0):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        self.table, self.state, self.size, self.kept = torch.zeros(table // 4), None, state, {}
        if kept:
            keep = self.kept
            self.layers[1].register_forward_hook(lambda _, __, out: keep.update(it=out.detach().repeat(1, kept)))

    def forward(self, x):
        y = self.layers(x) + self.table[:16].sum()
        if self.size:
            y = y if self.state is None else y + self.state.mean()
            self.state = y.detach().repeat(1, self.size)
        return y.square().mean()


def stepped(model, budget, steps=4):
    torch._dynamo.reset()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = memopt.compile(model, budget, optimizer=optimizer, backend="aten")
    for _ in range(steps):
        run(torch.randn(64, 16)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return run


@pytest.mark.whole_process
def test_what_a_model_holds_that_is_no_buffer_is_counted():
    """A table of 4 MB was in no budget."""
    gc.collect()
    gc.freeze()
    report = stepped(Keeps(table=400_000), "1MB").report
    assert report.breakdown.buffers == 400_000
    assert report.breakdown.total == report.peak_bytes > 400_000
    with pytest.raises(memopt.BudgetError) as refused:
        stepped(Keeps(table=400_000), "200kB")
    assert 400_000 < refused.value.minimum_bytes < 480_000
    assert stepped(Keeps(table=400_000), 0.99).report.budget_bytes > 400_000


@pytest.mark.whole_process
def test_what_a_model_is_given_to_hold_later_is_counted_from_the_next_look_on():
    gc.collect()
    gc.freeze()
    model = Keeps()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = memopt.compile(model, "300kB", optimizer=optimizer, backend="aten")
    with pytest.raises(memopt.BudgetError):
        for _ in range(2):
            run(torch.randn(64, 16)).backward()
            optimizer.step()
            optimizer.zero_grad()
            model.cache = torch.zeros(100_000)


@pytest.mark.whole_process
@pytest.mark.parametrize("place", ["state", "kept"])
def test_what_a_call_leaves_with_the_model_is_there_as_the_next_one_runs(place):
    gc.collect()
    gc.freeze()
    size = 64 * 16 * 4 * 100
    assert stepped(Keeps(**{place: 100}), int(2.5 * size)).report.notes == ()
    with pytest.raises(memopt.BudgetError):
        stepped(Keeps(**{place: 100}), 2 * size)


@pytest.mark.whole_process
def test_the_minimum_of_a_fraction_is_true_of_a_budget_in_bytes():
    """That is of other tensors of the process, too."""
    torch.manual_seed(0)
    models, x = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(2)], torch.randn(64, 32)
    others = torch.randn(50_000)
    with pytest.raises(memopt.BudgetError, match="which are in that: a budget in bytes is of them too") as refused:
        memopt.compile(models[0], 0.05, backend="aten")(x)
    least = refused.value.minimum_bytes
    assert least > others.nbytes
    run = memopt.compile(models[1], least, backend="aten")
    run(x).sum().backward()
    assert run.report.peak_bytes <= least


@pytest.mark.whole_process
def test_a_batch_that_is_a_view_of_what_an_earlier_call_saw_is_counted_once():
    """An evaluation on other tensors, then a step whose batch is a part of the data set."""
    torch.manual_seed(0)
    data, model = torch.randn(50_000, 32), nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
    run = memopt.compile(model, 0.05, backend="aten")
    with torch.no_grad():
        run(torch.randn(64, 32))
    assert any("of whose own peak a fraction is" in note for note in run.report.notes)
    with pytest.raises(memopt.BudgetError) as refused:
        run(data[:64])
    assert data.nbytes < refused.value.minimum_bytes < 2 * data.nbytes


def test_an_optimizers_step_is_none_of_an_evaluation():
    """Before the first step of training, too, of which a fraction is only then."""
    model, x = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), torch.randn(256, 64)
    run = memopt.compile(model, 0.7, backend="aten", optimizer=torch.optim.AdamW(model.parameters()))
    with torch.no_grad():
        run(x)
    report = run.report
    assert report.breakdown.total == report.peak_bytes <= report.budget_bytes
    assert report.measured_peak_bytes <= report.budget_bytes and report.breakdown.optimizer_state


class WithHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(32, 32), nn.Tanh())))
        self.head = nn.Linear(32, 2)

    def forward(self, x):
        return self.head(self.body(x)).square().mean()


@pytest.mark.parametrize("later", [False, True], ids=["given", "as a group"])
def test_a_fraction_is_of_the_step_that_trains_most_parameters(later):
    torch._dynamo.reset()
    model, budgets = WithHead(), []
    model.body.requires_grad_(False)
    optimizer = torch.optim.SGD(model.head.parameters() if later else model.parameters(), 0.1)
    call = memopt.compile(model, 1.0, optimizer=optimizer, backend="aten")
    for number in range(8):
        if number == 4:
            model.body.requires_grad_(True)
            if later:
                optimizer.add_param_group({"params": list(model.body.parameters())})
        optimizer.zero_grad()
        call(torch.randn(256, 32)).backward()
        optimizer.step()
        budgets.append(call.report.budget_bytes)
    assert len(set(budgets[:4])) == 1 and min(budgets[4:]) > 1.5 * budgets[0]
    assert call.report.notes == ()
