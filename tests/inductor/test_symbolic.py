"""Training steps with inputs of many sizes, compiled once: `memopt.compile(..., dynamic=True)`."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import memopt
from memopt.inductor import symbolic
from tests.inductor.test_peak_lower_bound import needs_compiler
from tests.training.steps import bytes_of, peak_of

pytestmark = [needs_compiler, pytest.mark.usefixtures("own_caches")]


class Layers(nn.Module):
    """Tokens to a loss, by layers whose activations outweigh their weights."""

    def __init__(self, layers: int = 2, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(self.norm(x)).tanh()
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def tokens(batch, length):
    return torch.randint(0, 8, (batch, length), generator=torch.Generator().manual_seed(batch * 1000 + length))


def agrees(run, model, twin, *inputs):
    """Losses and gradients are eager's, `None` included."""
    losses = []
    for each, gradients in ((run, model), (twin, twin)):  # one after the other: the budget holds what is between, too
        gradients.zero_grad()
        losses.append(each(*inputs))
        losses[-1].backward()
    found, wanted = (loss.detach() for loss in losses)
    torch.testing.assert_close(found, wanted)
    for (name, a), (_, b) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, msg=name)


def graphs_of(run):
    return run._memopt.sessions.graphs


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Layers()


@pytest.mark.long
def test_one_compilation_serves_all_sizes_and_the_report_is_of_the_largest(model):
    twin = copy.deepcopy(model)
    run, peaks = memopt.compile(model, "10MB", dynamic=True), []
    for batch, length in ((4, 24), (3, 17), (4, 40), (8, 64), (2, 9), (5, 33)):
        agrees(run, model, twin, tokens(batch, length))
        peaks.append(run.report.peak_bytes)
    made = graphs_of(run)
    assert peaks[0] == peaks[1] < peaks[2] < peaks[3] == peaks[4] == peaks[5] <= run.report.budget_bytes
    agrees(run, model, twin, tokens(7, 50))
    assert graphs_of(run) == made


def test_what_a_step_takes_is_what_was_counted_at_each_size(model):
    run = memopt.compile(model, "10MB", dynamic=True)
    for batch, length in ((4, 30), (8, 64)):
        ids = tokens(batch, length)
        run(ids).backward()
        model.zero_grad()
        peak = peak_of(lambda ids=ids: run(ids).backward(), model, ids)
        assert run.report.peak_bytes == pytest.approx(peak, rel=0.02)


def test_sizes_that_grow_step_by_step_are_counted_a_few_times_with_their_inputs(model, monkeypatch):
    counted, plain = [], symbolic.SymbolicTraining._count_more
    monkeypatch.setattr(
        symbolic.SymbolicTraining, "_count_more", lambda self, sizes: counted.append(sizes) or plain(self, sizes)
    )
    run = memopt.compile(model, "10MB")
    for length in (40, 12, 30, *range(41, 80)):
        run(tokens(4, length)).backward()
        model.zero_grad()
    # The first symbols are counted for the 40 that were seen.
    assert [max(sizes.values()) for sizes in counted] == [41, 42, 48, 61]
    assert run.report.breakdown.inputs == tokens(4, 83).nbytes
    peak = peak_of(lambda: run(tokens(4, 83)).backward(), model, tokens(4, 83))
    assert run.report.peak_bytes == pytest.approx(peak, rel=0.02) and len(counted) == 4
    assert not run._memopt.sessions.around.seen.held  # what counting leaves behind is not the loop's


class Positions(nn.Module):
    """A table of positions ends at one length."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.layer = nn.Parameter(torch.randn(20, 8)), nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x + self.positions[: x.shape[1]]).square().mean()


def test_no_more_is_counted_than_a_model_can_have():
    torch.manual_seed(0)
    model = Positions()
    twin = copy.deepcopy(model)
    run = memopt.compile(model, "10MB")
    for length in (8, 9, 17, 19, 20):
        agrees(run, model, twin, torch.randn(2, length, 8))
    assert graphs_of(run) == 2 and run.report.notes == ()


@pytest.mark.long
def test_a_size_that_has_no_room_is_planned_by_itself_and_others_go_on(model, caplog, monkeypatch):
    monkeypatch.setattr(symbolic, "_PLANS", 0)  # no plan is made for code with symbols
    free = memopt.compile(copy.deepcopy(model), dynamic=True)
    free(tokens(8, 64)).backward()
    budget = int(0.8 * free.report.peak_bytes)
    torch._dynamo.reset()
    twin = copy.deepcopy(model)
    run = memopt.compile(model, budget, dynamic=True)
    agrees(run, model, twin, tokens(4, 20))
    for batch, length in ((8, 64), (3, 12), (8, 64), (5, 25)):
        agrees(run, model, twin, tokens(batch, length))
        made = graphs_of(run)
        model.zero_grad()
        ids = tokens(batch, length)
        assert peak_of(lambda ids=ids: run(ids).backward(), model, ids) <= budget
    for batch, length in ((8, 64), (2, 15)):
        agrees(run, model, twin, tokens(batch, length))
    assert graphs_of(run) == made
    lines = [record.getMessage() for record in caplog.records if "planned each by itself" in record.getMessage()]
    assert len(lines) == 1 and "ids.size()[1] = 64" in lines[0]


class Images(nn.Module):
    """Convolutions and batch norms, whose buffers are written, and a head that the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head, self.unused = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x):
        x = self.norm(self.convolution(x)).relu().mean((2, 3))
        self.unused(x)
        return self.head(x).square().mean()


@pytest.mark.long
def test_buffers_are_written_and_heads_without_a_loss_get_no_gradient():
    torch.manual_seed(0)
    model = Images()
    twin = copy.deepcopy(model)
    run = memopt.compile(model, "20MB", dynamic=True)
    for batch, size in ((4, 16), (6, 20), (3, 12)):
        agrees(run, model, twin, torch.randn(batch, 3, size, size))
    for a, b in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(a, b)


class Constants(nn.Module):
    """Tensors made of numbers, and a small one that is read with what varies."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count.add_(1)
        scale = torch.tensor([1.0, 2.0, 3.0, 4.0] * 2)
        return (self.layer(x) * scale / self.count).square().mean()


def test_constants_of_the_graph_and_small_buffers_that_are_read_and_written():
    torch.manual_seed(0)
    model = Constants()
    twin = copy.deepcopy(model)
    run = memopt.compile(model, "10MB", dynamic=True)
    for batch in (4, 7, 5):
        agrees(run, model, twin, torch.randn(batch, 8))
    assert not run.report.notes
    torch.testing.assert_close(model.count, twin.count)


class Padded(nn.Module):
    """What is short is padded: its tensors are larger."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 256)

    def forward(self, x):
        rest = torch.ones(96 - x.shape[0], 4, dtype=x.dtype) * x.mean()
        return self.layer(rest).tanh().exp().square().mean() + x.mean()


def test_sizes_that_are_smaller_are_counted_where_tensors_become_larger():
    torch.manual_seed(0)
    model = Padded()
    twin = copy.deepcopy(model)
    run, peaks = memopt.compile(model, "10MB", dynamic=True), []
    for batch in (80, 8, 40):
        agrees(run, model, twin, torch.randn(batch, 4))
        peaks.append(run.report.peak_bytes)
    assert peaks[0] < peaks[1] > peaks[2] > peaks[0]


class Broken(nn.Module):
    """A number of a tensor ends its first graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x).relu()
        if float(x.detach().sum()) < 0:
            x = x * 2
        return self.last(x).square().mean()


@pytest.mark.long
def test_a_model_of_several_graphs_is_planned_size_by_size_and_says_so(caplog):
    torch.manual_seed(0)
    model = Broken()
    twin = copy.deepcopy(model)
    run = memopt.compile(model, "1MB", dynamic=True)
    for batch in (4, 7):
        agrees(run, model, twin, torch.randn(batch, 8))
    assert "several graphs" in caplog.text and any("several graphs" in note for note in run.report.notes)


def test_other_engines_plan_size_by_size_and_say_so(model, caplog):
    twin = copy.deepcopy(model)
    run = memopt.compile(model, "10MB", dynamic=True, backend="aten")
    for length in (10, 12):
        agrees(run, model, twin, tokens(2, length))
    assert "'aten' makes no code for many sizes" in caplog.text


@pytest.mark.long
def test_a_graph_may_be_kept_and_gradients_add_up(model):
    twin = copy.deepcopy(model)
    run = memopt.compile(model, "10MB", dynamic=True)
    for length in (10, 14, 12):
        found, wanted = run(tokens(4, length)), twin(tokens(4, length))
        for loss in (found, wanted):
            loss.backward(retain_graph=True)
            loss.backward()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.long
def test_evaluation_between_steps_and_a_whole_loop_with_an_optimizer(model):
    twin = copy.deepcopy(model)
    steps = {each: torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, twin)}
    run = memopt.compile(model, "10MB", dynamic=True, optimizer=steps[model])
    for length in (12, 20, 16):
        agrees(run, model, twin, tokens(4, length))
        for optimizer in steps.values():
            optimizer.step()
        with torch.no_grad():
            torch.testing.assert_close(run(tokens(4, 12)), twin(tokens(4, 12)))


@pytest.mark.long
def test_verified_fully_it_is_the_model(model):
    run = memopt.compile(model, "30MB", dynamic=True, verify="full")
    for length in (10, 20):
        run(tokens(4, length)).backward()


def test_the_batch_that_it_was_compiled_for_is_let_go_of(model):
    run = memopt.compile(model, "10MB", dynamic=True)
    ids = tokens(4, 20)
    gone = weakref.ref(ids)
    run(ids).backward()
    model.zero_grad()
    del ids
    gc.collect()
    assert gone() is None
    assert bytes_of(list(model.parameters())) < run.report.peak_bytes


@pytest.mark.long
def test_where_the_first_size_has_no_room_smaller_ones_share_code_all_the_same(model):
    free = memopt.compile(copy.deepcopy(model), dynamic=True)
    free(tokens(8, 64)).backward()
    budget = int(0.8 * free.report.peak_bytes)
    torch._dynamo.reset()
    twin = copy.deepcopy(model)
    run = memopt.compile(model, budget, dynamic=True)
    for batch, length in ((8, 64), (4, 20)):
        agrees(run, model, twin, tokens(batch, length))
    made = graphs_of(run)
    run._memopt.fast_path.clear()  # calls go the long way
    for batch, length in ((8, 64), (3, 18), (8, 64), (4, 10)):
        agrees(run, model, twin, tokens(batch, length))
        assert run._memopt.last.ran
    assert graphs_of(run) == made


@pytest.mark.long
def test_a_plan_is_made_for_the_largest_sizes_so_far(model, monkeypatch):
    free = memopt.compile(copy.deepcopy(model), dynamic=True)
    free(tokens(8, 64)).backward()
    budget = int(0.8 * free.report.peak_bytes)
    torch._dynamo.reset()
    tried, plain = [], symbolic.SymbolicTraining._planned

    def planned(self, sizes, own):
        if self._request.search:
            tried.append(sorted(sizes.values()))
        return plain(self, sizes, own)

    monkeypatch.setattr(symbolic.SymbolicTraining, "_planned", planned)
    twin = copy.deepcopy(model)
    run = memopt.compile(model, budget)
    for batch, length in ((8, 20), (2, 64), (7, 64)):
        agrees(run, model, twin, tokens(batch, length))
    assert tried[0] == [9, 72]
