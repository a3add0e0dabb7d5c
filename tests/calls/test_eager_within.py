"""A model that cannot be captured runs eagerly within a budget that its counted step keeps."""

import contextlib

import pytest
import torch
from torch import nn

import memopt
from memopt.calls.planned import PlannedCalls

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Loop(nn.Module):
    """Breaks in the midst of a loop: nothing of it is captured."""

    def __init__(self, layers=3):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(layers)])
        self.times = 1

    def forward(self, x):
        for layer in self.layers:
            for _ in range(self.times):
                torch._dynamo.graph_break()
                x = layer(x).tanh()
        return x


def stepped(call, x):
    call(x).sum().backward()


def total(call, model, x, step=stepped):
    model.zero_grad()
    taken = memopt.measure(lambda: step(call, x)).peak_bytes
    model.zero_grad()
    return taken + sum(p.nbytes for p in model.parameters()) + x.nbytes


@pytest.mark.parametrize("budget", [1.0, "1MB"])
@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_what_cannot_be_captured_runs_eagerly_within_its_budget(budget, backend, caplog):
    model, x = Loop(), torch.randn(32, 16)
    run = memopt.compile(model, budget, backend=backend)
    for _ in range(3):
        found = run(x).detach()
        assert torch.equal(found, Loop()(x))
        taken = total(run, model, x)
    report = run.report
    assert taken <= report.peak_bytes <= report.budget_bytes and report.peak_bytes < 1.2 * taken
    assert sum("runs eagerly: " in note for note in report.notes) == 1
    assert "no graph could be captured of Loop" in report.notes[-1] and str(report).count("runs eagerly")
    with torch.no_grad():
        run(x)
    assert run.report.peak_bytes <= run.report.budget_bytes
    said = [record.getMessage() for record in caplog.records if "runs eagerly" in record.getMessage()]
    assert said and len(said) == len(set(said)) <= 3 and all("test_eager_within.py:" in line for line in said)


def test_more_than_the_budget_is_refused_each_time_it_is_asked_for():
    model, x = Loop(), torch.randn(32, 16)
    budget = total(model, model, x) + 2048  # a caller may hold outputs
    model.zero_grad()
    run = memopt.compile(model, budget, backend="aten")
    for rows in (32, 320, 32):
        model.zero_grad()
        with pytest.raises(memopt.BudgetError) if rows > 32 else contextlib.nullcontext():
            stepped(run, x[:1].expand(rows, 16).clone())
    model.zero_grad()
    run.times = 10
    with pytest.raises(memopt.BudgetError):
        stepped(run, x)
    run.times = 1
    model.zero_grad()
    assert total(run, model, x) <= run.report.peak_bytes <= budget


def test_a_second_call_of_the_step_counts_what_the_first_one_holds():
    def step(call, x):
        (call(x) - call(x + 1)).square().sum().backward()

    model, x = Loop(), torch.randn(64, 16)
    run = memopt.compile(model, total(model, model, x) + 8192, backend="aten")
    model.zero_grad()
    with pytest.raises(memopt.BudgetError):
        step(run, x)
    model.zero_grad()
    stepped(run, x)
    both = memopt.compile(model, total(model, model, x, step) + 16384, backend="aten")
    model.zero_grad()
    for _ in range(2):
        assert total(both, model, x, step) <= both.report.budget_bytes
    assert not both._memopt.earlier.alive()


def test_state_that_is_learned_of_is_counted_in_the_next_step():
    model, x = Loop(), torch.randn(32, 16)
    run = memopt.compile(model, total(model, model, x) + 4096, backend="aten")
    model.zero_grad()
    optimizer = torch.optim.Adam(model.parameters())
    stepped(run, x)
    optimizer.step()
    with pytest.raises(memopt.BudgetError):
        stepped(run, x)


def test_gradients_that_exist_are_added_to_one_by_one():
    model, x = Loop(12), torch.randn(2, 16)
    stepped(model, x)
    held = sum(2 * p.nbytes for p in model.parameters()) + x.nbytes
    budget = held + memopt.measure(lambda: stepped(model, x)).peak_bytes + 4096
    run = memopt.compile(model, budget, backend="aten")
    stepped(run, x)
    assert run.report.peak_bytes <= budget < held + sum(p.nbytes for p in model.parameters())


def test_gradients_that_a_loop_lets_go_of_are_no_excess_and_no_call_runs_whole_to_be_captured(
    monkeypatch,
):
    """Steps that begin with gradients ran whole, without checkpoints, and were refused: the gradients counted twice."""
    model, x, runs = Loop(), torch.randn(32, 64), []
    model.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(3)])
    run_planned = PlannedCalls.run
    monkeypatch.setattr(PlannedCalls, "run", lambda self, *given: runs.append(given) or run_planned(self, *given))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = memopt.compile(model, "1MB", optimizer=optimizer, backend="aten")
    for _ in range(4):
        loss = run(x).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert len(runs) == 1
    assert not any("more than was counted" in note for note in run.report.notes)


@pytest.mark.parametrize("budget", ["1MB", "10kB"])
def test_example_inputs_are_no_reason_to_refuse_what_runs_eagerly(budget):
    model, x = Loop(), torch.randn(32, 16)
    with contextlib.nullcontext() if budget == "1MB" else pytest.raises(memopt.BudgetError):
        run = memopt.compile(model, budget, backend="aten", example_inputs=x)
        assert "runs eagerly" in run.report.notes[-1]
        stepped(run, x)


def counted(model, x):
    """What a step of the model as it is was counted to take."""
    run = memopt.compile(model, "1MB", backend="aten")
    stepped(run, x)
    model.zero_grad()
    return run.report.peak_bytes


class Off(Loop):
    """Not traced at all, as what a user has switched Dynamo off for."""

    @torch.compiler.disable
    def forward(self, x):
        return self.work(x)


def test_a_refusal_names_the_place_and_the_bytes_in_one_line():
    class Plain(Off):
        def work(self, x):
            return self.layers[0](x).tanh()

    model, x = Plain(), torch.randn(256, 16)
    needed = counted(model, x)
    with pytest.raises(memopt.BudgetError, match=r"Plain\.forward, test_eager_within\.py:\d+; .*checkpoint") as refused:
        memopt.compile(model, needed - 1, backend="aten")(x)
    assert refused.value.minimum_bytes == needed and "\n" not in str(refused.value)


class Hides(Off):
    """Takes what fake tensors do not show."""

    def work(self, x):
        hidden = torch.empty(64, 1024) if type(x) is torch.Tensor else None
        del hidden
        return self.layers[0](x).tanh()


@pytest.mark.parametrize("budget", ["1MB", 1.0, "200kB"])
def test_what_a_real_step_takes_beyond_its_count_is_said_and_counted_from_then_on(budget, caplog):
    model, x = Hides(), torch.randn(64, 16)
    run = memopt.compile(model, budget, backend="aten")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        with pytest.raises(memopt.BudgetError) if step and budget == "200kB" else contextlib.nullcontext():
            stepped(run, x)
        optimizer.step()
        optimizer.zero_grad()
    said = [record.getMessage() for record in caplog.records if "more than was counted" in record.getMessage()]
    assert len(said) == 1 and ("refused now" in said[0]) == (budget == "200kB")
    if budget != "200kB":
        assert 64 * 4096 <= run.report.measured_peak_bytes <= run.report.peak_bytes <= run.report.budget_bytes


def test_an_excess_in_inference_is_said_too(caplog):
    model, x = Hides(), torch.randn(64, 16)
    run = memopt.compile(model.eval(), "1MB", backend="aten")
    with torch.no_grad():
        assert torch.equal(run(x), run(x))
    assert sum("more than was counted" in record.getMessage() for record in caplog.records) == 1
    assert 64 * 4096 <= run.report.measured_peak_bytes <= run.report.peak_bytes


def test_a_fraction_is_of_what_the_loop_keeps_too_and_outputs_that_were_left_are_no_earlier_call():
    model, x = nn.LSTM(8, 8), torch.randn(16, 4, 8)
    run = memopt.compile(model, 1.0, backend="aten")
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(4):
        out, state = run(x)
        out.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert not run._memopt.earlier.alive()
    assert run.report.peak_bytes <= run.report.budget_bytes and len(state) == 2


def losses(call, model, style):
    torch.manual_seed(0)
    optimizer, x, found = torch.optim.Adam(model.parameters(), lr=0.1), torch.randn(8, 4, 16), []
    for _ in range(2):
        if style == "evaluated":
            call.eval()
            with torch.no_grad():
                found.append(call(x)[0].sum().item())
            call.train()
        with torch.autocast("cpu", torch.bfloat16, enabled=style == "autocast"):
            loss = call(x)[0].square().mean()
            loss = loss + call(x + 1)[0].mean() if style == "two calls" else loss
        loss.backward(retain_graph=style == "retained")
        if style == "retained":
            loss.backward()
        elif style == "accumulated":
            call(x * 2)[0].sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


class Apart(nn.LSTM):
    @torch.compiler.disable
    def forward(self, x):
        return super().forward(x)


@pytest.mark.parametrize("style", ["evaluated", "autocast", "two calls", "retained", "accumulated"])
def test_any_loop_gives_the_numbers_of_the_model_itself(style):
    models = [Apart(16, 16, 2, dropout=0.3) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    run = memopt.compile(models[1], "10MB", backend="aten", verify="full" if style == "evaluated" else True)
    assert losses(run, models[1], style) == losses(models[0], models[0], style)
    assert any("runs eagerly" in note for note in run.report.notes)


def test_a_packed_sequence_may_be_an_input():
    model = nn.GRU(4, 8)
    packed = nn.utils.rnn.pack_sequence([torch.randn(length, 4) for length in (5, 3, 1)])
    run = memopt.compile(model, "1MB", backend="aten")
    found = run(packed)
    assert torch.equal(found[0].data, model(packed)[0].data) and "runs eagerly" in run.report.notes[-1]
    found[0].data.sum().backward()


class OtherAsTraced(nn.Module):
    """Adds a mask of a wrong shape, but only as it is traced: masks of transformers are left out in eager."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        h = self.up(x).tanh()
        if torch.compiler.is_compiling():
            h = h + torch.ones(3, 5)
        return self.down(h)


@pytest.mark.parametrize("given", [False, True])
def test_what_fails_only_as_it_is_traced_runs_eagerly_and_the_place_is_named(given):
    model, x = OtherAsTraced(), torch.randn(32, 16)
    run = memopt.compile(model, 1.0, backend="aten", example_inputs=(x,) if given else None)
    for _ in range(2):
        assert torch.equal(run(x), OtherAsTraced()(x))
    assert total(run, model, x) <= run.report.budget_bytes
    (note,) = (note for note in run.report.notes if "runs eagerly" in note)
    assert "traced, it raises RuntimeError" in note and "test_eager_within.py:" in note
    assert "which it does not by itself" in note and "please report" not in note


def test_what_fails_by_itself_raises_its_own_error():
    model = OtherAsTraced()
    run = memopt.compile(model, 1.0, backend="aten")
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        run(torch.randn(32, 15))
    x = torch.randn(32, 16)
    assert torch.equal(run(x), model(x))
