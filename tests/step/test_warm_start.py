from __future__ import annotations

import copy
import dataclasses
import multiprocessing
import os
import shutil
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import memopt
from memopt.backends.inductor import missing_compiler
from memopt.calls.sessions import Sessions
from memopt.capture.dynamo import Hooks
from memopt.inductor.training import Training
from memopt.step import script_store, warm_start

pytestmark = pytest.mark.skipif(missing_compiler(torch.device("cpu")) is not None, reason="no C++ compiler")


def _caches_in(folder, patch):
    patch.setenv("MEMOPT_CACHE_DIR", str(folder / "memopt"))
    patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    for module in (warm_start, script_store):
        patch.setattr(module, "versions", lambda: "as ever")


@pytest.fixture(autouse=True)
def _own_caches(tmp_path, monkeypatch):
    _caches_in(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def settled(tmp_path_factory):
    """The step of a model, and the folder of all that is kept of it; made once for all tests."""
    folder = tmp_path_factory.mktemp("settled")
    with pytest.MonkeyPatch.context() as patch:
        _caches_in(folder, patch)
        return folder, _step(_model())


@pytest.fixture
def first(settled, tmp_path):
    """A step as an earlier process has settled it, which the test has on disk for itself."""
    folder, seen = settled
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return seen


class Block(nn.Module):
    def __init__(self, width=64, dropout=0.0):
        super().__init__()
        self.norm, self.wide = nn.BatchNorm1d(width), nn.Linear(width, 4 * width)
        self.narrow, self.dropout = nn.Linear(4 * width, width), nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.narrow(nn.functional.gelu(self.wide(self.norm(x)))))


def _model(dropout=0.0, blocks=3):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(dropout=dropout) for _ in range(blocks)))


def _batch(rows=256):
    return torch.linspace(-1, 1, rows * 64).reshape(rows, 64)


@dataclasses.dataclass
class Seen:
    model: nn.Module
    run: nn.Module
    attempts: int
    results: list

    @property
    def found(self):
        """Whether the step was there, and nothing was lowered."""
        return not self.attempts


def _step(model, budget="60%", rows=256, optimizer=None, **options):
    """A step as in a process of its own: nothing is compiled yet."""
    torch._dynamo.reset()
    model, attempts, plain = copy.deepcopy(model), [], Training._attempt

    def counted(self, *, planned):
        attempts.append(planned)
        return plain(self, planned=planned)

    options = options if optimizer is None else {**options, "optimizer": optimizer(model.parameters())}
    run = memopt.compile(model, budget, backend="inductor", **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "_attempt", counted)
        results = _results(model, run, rows)
    return Seen(model, run, len(attempts), results)


def _results(model, run, rows=256):
    torch.manual_seed(7)
    model.zero_grad()
    loss = run(_batch(rows)).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters()), *(b.clone() for b in model.buffers())]


def _equal(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.quick("0.3")
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_settled_step_is_found_again_with_its_numbers_and_its_report(dropout):
    first, second = (_step(_model(dropout, blocks=2), "75%") for _ in range(2))
    assert not first.found and second.found
    assert _equal(first.results, second.results)
    ours, theirs = (dataclasses.replace(item.run.report, seconds={}) for item in (first, second))
    assert ours == theirs
    _results(second.model, second.run)  # planned anew where the fraction is of less, as the loss was seen
    settled = second.run.report
    assert settled.budget_bytes is not None and settled.peak_bytes <= settled.budget_bytes


def test_a_fraction_is_of_as_much_as_where_the_step_was_planned():
    budgets = []
    for _ in range(2):
        torch._dynamo.reset()
        model = _model(blocks=1)
        run = memopt.compile(model, "95%", backend="inductor", optimizer=torch.optim.AdamW(model.parameters()))
        for _ in range(3):
            _results(model, run)
        budgets.append((run.report.budget_bytes, run.report.peak_bytes, run._memopt.sessions.reference.training))
    assert budgets[0] == budgets[1]


@pytest.mark.usefixtures("first")
def test_nothing_is_traced_for_it(monkeypatch):
    from torch._functorch._aot_autograd import graph_compile

    def never(*_, **__):
        raise AssertionError("the joint graph was traced")

    monkeypatch.setattr(graph_compile, "aot_dispatch_autograd_graph", never)
    assert _step(_model()).found


@pytest.mark.long
def test_later_steps_go_on_as_if_it_had_been_planned_here():
    first, second = (_step(_model(), "2.5MB") for _ in range(2))
    assert second.found
    for rows in (256, 96, 256):  # another size is planned; the first is still there
        assert _equal(_results(first.model, first.run, rows), _results(second.model, second.run, rows))
    with torch.no_grad():
        assert torch.equal(first.run.eval()(_batch()), second.run.eval()(_batch()))


@pytest.mark.long
def test_an_optimizer_that_is_learned_of_later_counts_in_a_warm_start():
    _step(_model(), "4MB")
    second = _step(_model(), "4MB")
    assert second.found and second.run.report.breakdown.optimizer_state == 0
    optimizer = torch.optim.SGD(second.model.parameters(), lr=0.01, momentum=0.9)
    optimizer.step()
    _results(second.model, second.run)
    state = sum(p.nbytes for p in second.model.parameters())
    assert second.run.report.breakdown.optimizer_state == state
    assert second.run.report.peak_bytes <= second.run.report.budget_bytes


@pytest.mark.long
def test_each_size_of_input_is_found_again():
    first = _step(_model(), "2.5MB")
    _results(first.model, first.run, 96)
    second = _step(_model(), "2.5MB")
    counters.clear()
    _results(second.model, second.run, 96)
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1


@pytest.mark.long
def test_gradients_that_exist_already_are_another_step():
    first = _step(_model(), "2.5MB")
    first.run(_batch()).square().mean().backward()  # adds to them
    second = _step(_model(), "2.5MB")
    assert second.found
    second.run(_batch()).square().mean().backward()
    assert "tracing" in second.run.report.seconds and "generating code" not in second.run.report.seconds
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.quick("budget", "source")
@pytest.mark.parametrize("what", ["budget", "optimizer", "passes", "model", "name", "source", "size"])
@pytest.mark.usefixtures("first")
def test_what_a_step_depends_on_is_told_apart(what, monkeypatch):
    model, budget, options, rows = _model(), "60%", {}, 256
    if what == "budget":
        budget = "61%"
    elif what == "optimizer":
        budget, options = "90%", {"optimizer": torch.optim.AdamW}
    elif what == "passes":
        options = {"passes": [item for item in memopt.passes.TRAINING if item.name != "merge_common"]}
    elif what == "model":
        model = _model(blocks=4)
    elif what == "name":
        model = nn.Sequential(*model)
        model = type("Another", (nn.Sequential,), {})(*model)
    elif what == "source":
        monkeypatch.setattr(warm_start, "versions", lambda: "another")
    else:
        rows = 255
    assert not _step(model, budget, rows, **options).found


def test_without_a_budget_nothing_is_kept(tmp_path):
    torch._dynamo.reset()
    memopt.compile(_model(blocks=1), backend="inductor")(_batch()).sum().backward()
    assert not (tmp_path / "memopt" / "steps").exists()


@pytest.mark.quick("MEMOPT_CACHE")
@pytest.mark.parametrize("name", ["MEMOPT_CACHE", "fx_graph_cache"])
def test_who_wants_no_cache_has_none(name, monkeypatch, tmp_path):
    monkeypatch.setenv("MEMOPT_CACHE", "0" if name == "MEMOPT_CACHE" else "1")
    with torch._inductor.config.patch(fx_graph_cache=name == "MEMOPT_CACHE"):
        assert not _step(_model()).found and not _step(_model()).found
    assert not (tmp_path / "inductor" / "aotautograd").exists()


@pytest.mark.quick("steps")
@pytest.mark.parametrize("lost", ["steps", "aotautograd", "fxgraph"])
def test_where_a_part_of_it_is_lost_the_step_is_lowered(lost, first, tmp_path):
    for folder in [path for path in tmp_path.rglob(lost) if path.is_dir()]:
        shutil.rmtree(folder)
    second = _step(_model())
    assert not second.found and _equal(first.results, second.results)
    assert _step(_model()).found


@pytest.mark.quick("steps")
@pytest.mark.parametrize("damaged", ["steps", "aotautograd"])
def test_what_is_damaged_is_ignored(damaged, first, tmp_path):
    files = [path for path in tmp_path.rglob("*") if path.is_file() and damaged in path.parts]
    assert files
    for path in files:
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2] + os.urandom(len(data) // 2))
    second = _step(_model())
    assert not second.found and _equal(first.results, second.results)


def test_a_step_that_does_not_keep_the_budget_now_is_planned_anew(first, monkeypatch):
    monkeypatch.setattr(warm_start, "_still_keeps", lambda *_: False)
    second = _step(_model())
    assert not second.found
    assert _equal(first.results, second.results)
    assert second.run.report.peak_bytes == first.run.report.peak_bytes


@pytest.mark.long
def test_a_model_with_graph_breaks_is_planned_as_a_whole_each_time():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Block(), Block()

        def forward(self, x):
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x)

    def made():
        torch.manual_seed(0)
        return Broken()

    first, second = _step(made(), "2.5MB"), _step(made(), "2.5MB")
    assert not first.found and not second.found
    assert len(second.run.report.programs) == 2
    assert _equal(first.results, second.results)


@pytest.mark.long
def test_its_backward_runs_within_what_is_put_around_backward(monkeypatch):
    seen, plain = [], Hooks.backward

    def watched(self, run):
        inner = plain(self, run)

        def call(args):
            seen.append(len(args))
            return inner(args)

        return call

    monkeypatch.setattr(Hooks, "backward", watched)
    _step(_model())
    first = list(seen)
    second = _step(_model())
    assert second.found and len(first) == 1 and seen == 2 * first


def _step_on_cuda(optimizer):
    """A step of a GPT-2 in this process; its report, its loss and its gradients."""
    Sessions._graph_pool_here = lambda self: None  # a captured step is made anew
    torch.manual_seed(0)
    model = memopt.models.build("gpt2_medium", layers=4, width=512, heads=8, vocabulary=4096)
    model = model.to("cuda", torch.bfloat16)
    options = {} if optimizer is None else {"optimizer": optimizer(model.parameters())}
    run = memopt.compile(model, "80%", backend="inductor", **options)
    torch.manual_seed(7)
    loss = run(**model.example_inputs(8, labels=True))
    loss.backward()
    return run.report, loss.detach().cpu(), [parameter.grad.cpu() for parameter in model.parameters()]


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", [None, torch.optim.AdamW])
def test_on_cuda_it_is_taken_before_it_is_trusted(optimizer):
    found = []
    for _ in range(2):  # each in a process of its own: what one left would lie between the other's blocks
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
            found.append(alone.submit(_step_on_cuda, optimizer).result())
    (first, loss, gradients), (second, same, others) = found
    assert "generating code" in first.seconds
    assert "trial steps" in second.seconds and "generating code" not in second.seconds
    assert second.measured_peak_bytes is not None and second.measured_peak_bytes <= second.budget_bytes
    assert torch.equal(loss, same)
    for a, b in zip(gradients, others, strict=True):  # attention's backward adds up by atomics
        torch.testing.assert_close(a, b, rtol=0, atol=2 * torch.finfo(a.dtype).eps * a.abs().max().item())


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.first, self.second = Block(), nn.Linear(64, 8), nn.Linear(64, 8)

    def forward(self, x):
        h = self.body(x)
        return self.first(h), self.second(h)


@pytest.mark.long
def test_a_step_that_is_found_leaves_unused_heads_alone_and_may_keep_its_graph():
    torch.manual_seed(0)
    plain, batch = Heads(), _batch()
    for _ in range(2):
        torch._dynamo.reset()
        found = []
        for model in (copy.deepcopy(plain), copy.deepcopy(plain)):
            run = model if not found else memopt.compile(model, "90%", backend="inductor", verify=False)
            y, _ = run(batch)
            y.square().mean().backward(retain_graph=True)
            y[3].sum().backward()
            found.append([parameter.grad for parameter in model.parameters()])
        for first, second in zip(*found, strict=True):
            assert (first is None) == (second is None)
            if first is not None:
                torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-5)
