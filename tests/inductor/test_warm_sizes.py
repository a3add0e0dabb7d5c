"""Code for many sizes in a later process: found, judged by what there is then, and made anew where it is not enough."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import memopt
from memopt.inductor import symbolic
from memopt.inductor.symbolic import SymbolicTraining
from memopt.step import script_store, warm_sizes, warm_start
from memopt.torch_compat import aot_cache
from tests.inductor.test_peak_lower_bound import needs_compiler
from tests.planning import alone

pytestmark = [needs_compiler, pytest.mark.usefixtures("own_caches")]


class Layers(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(8, width), nn.Linear(width, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(self.second(self.first(x).tanh())).square().mean()


class Process:
    """A script's run, which finds on disk what earlier ones left."""

    def __init__(self, budget="3MB", *, width=16, optimizer=None, mark=False, **options):
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model, self.mark = Layers(width), mark
        self.twin = copy.deepcopy(self.model)
        if optimizer is not None:
            options["optimizer"] = optimizer(self.model.parameters(), lr=0.1)
        self.run = memopt.compile(self.model, budget, backend="inductor", **options)
        self.lowered, self.peaks = 0, []

    def steps(self, *rows):
        """Steps at these sizes, each beside eager's; the process itself."""
        plain = SymbolicTraining._lowered

        def counted(lowering, sizes):
            self.lowered += 1
            return plain(lowering, sizes)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SymbolicTraining, "_lowered", counted)
            for count in rows:
                self._step(torch.randn(count, 8, generator=torch.Generator().manual_seed(count)))
        return self

    def _step(self, x):
        if self.mark:
            torch._dynamo.mark_dynamic(x, 0)
        found = []
        for each, model in ((self.run, self.model), (self.twin, self.twin)):
            model.zero_grad()
            loss = each(x)
            loss.backward()
            found.append((loss.detach(), [p.grad for p in model.parameters()], list(model.buffers())))
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
        self.peaks.append(self.run.report.peak_bytes)


ROWS = (40, 20, 60, 30)


def caches_in(folder, patch):
    """What is kept lies in this folder, and is found by every test that looks there."""
    patch.setenv("MEMOPT_CACHE_DIR", str(folder))
    patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    for module in (warm_start, script_store):
        patch.setattr(module, "versions", lambda: "as ever")


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    """A process that has taken steps at all sizes, and the folder of all that it left; made once for all tests."""
    folder = tmp_path_factory.mktemp("earlier")
    with pytest.MonkeyPatch.context() as patch:
        caches_in(folder, patch)
        alone(patch)
        return folder, Process().steps(*ROWS)


@pytest.fixture
def first(earlier, tmp_path, monkeypatch):
    """That process, of which the test has on disk for itself what it left."""
    folder, process = earlier
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    caches_in(tmp_path, monkeypatch)
    return process


@pytest.mark.parametrize("mark", [False, True])
def test_a_second_process_makes_no_code_and_reports_the_same(mark, request):
    first = Process(mark=True).steps(*ROWS) if mark else request.getfixturevalue("first")
    counters.clear()
    second = Process(mark=mark).steps(*ROWS)
    assert first.lowered == 1 and second.lowered == 0
    assert counters["aot_autograd"]["autograd_cache_hit"] == (1 if mark else 2)
    assert second.peaks == first.peaks and second.run.report.notes == first.run.report.notes == ()
    assert second.run.report.budget_bytes == first.run.report.budget_bytes


@pytest.mark.long
def test_sizes_may_come_in_another_order():
    Process().steps(*ROWS)
    second = Process().steps(60, 25, 59, 40)
    assert second.lowered == 0 and second.run.report.peak_bytes <= 3_000_000


@pytest.mark.long
def test_a_fraction_is_of_the_first_step_of_each_process():
    first = Process(1.0).steps(40, 20, 30)
    second = Process(1.0).steps(60, 20, 40)
    third = Process(1.0).steps(24, 10, 20)  # what is known of its code is counted for more than this one's budget
    assert second.lowered == 0 and third.lowered == 1
    budgets = [process.run.report.budget_bytes for process in (third, first, second)]
    assert budgets == sorted(set(budgets)) and third.peaks[-1] <= budgets[0]


@pytest.mark.long
def test_what_is_larger_than_ever_is_counted_and_known_to_the_next_process():
    Process().steps(40, 20, 30)
    second = Process().steps(40, 20, 90, 15)
    assert second.lowered == 1 and max(second.peaks) == second.peaks[2]
    counters.clear()
    third = Process().steps(40, 20, 90, 15)
    assert third.lowered == 0 and third.peaks == second.peaks
    assert not counters["aot_autograd"]["autograd_cache_miss"]


def test_sizes_that_were_over_the_budget_are_known_to_be(monkeypatch):
    plain = SymbolicTraining._excess
    monkeypatch.setattr(symbolic, "_PLANS", 0)  # no plan is made for them either

    def excess(self, sizes):
        return plain(self, sizes) if max(sizes.values()) <= 60 else 1

    with monkeypatch.context() as patch:
        patch.setattr(SymbolicTraining, "_excess", excess)
        first = Process().steps(40, 20, 60, 80, 30)
    second = Process().steps(40, 80, 20, 60, 30)
    assert first.lowered == 1 and second.lowered == 0
    assert any("does not keep the budget at" in note for note in second.run.report.notes)


@pytest.mark.quick("width", "budget")
@pytest.mark.parametrize("what", ["budget", "optimizer", "width", "source", "passes", "mode"])
@pytest.mark.usefixtures("first")
def test_what_code_depends_on_is_told_apart(what, monkeypatch):
    options, budget, width = {}, "3MB", 16
    if what == "budget":
        budget = "4MB"
    elif what == "optimizer":
        options = {"optimizer": torch.optim.AdamW}
    elif what == "width":
        width = 32
    elif what == "source":  # memopt's own, or another version of torch
        monkeypatch.setattr(warm_start, "versions", lambda: "another")
    elif what == "passes":
        options = {"verify": "full"}
    second = Process(budget, width=width, **options)
    if what == "mode":
        second.model.norm.eval()
        second.twin.norm.eval()
    assert second.steps(40, 20).lowered > 0


@pytest.mark.quick("steps")
@pytest.mark.parametrize("lost", ["sizes", "steps", "aotautograd"])
def test_where_a_part_of_it_is_lost_code_is_made_anew(lost, first, tmp_path):
    for path in [path for path in tmp_path.rglob("*") if path.is_file() and lost in path.parts]:
        path.write_bytes(path.read_bytes()[:-20])
    second = Process().steps(40, 20)
    assert second.lowered == 1 and second.peaks == first.peaks[:2]
    assert Process().steps(40, 20).lowered == 0


def test_without_a_budget_nothing_is_kept(tmp_path):
    Process(None).steps(40, 20, 30)
    assert not list(tmp_path.rglob("sizes"))


@pytest.mark.usefixtures("first")
def test_a_budget_that_is_kept_no_longer_is_found_out(monkeypatch):
    monkeypatch.setattr(warm_sizes, "_keeps", lambda *_: False)
    assert Process().steps(40, 20, 60).lowered == 1


def test_entries_of_torchs_cache_are_told_apart_by_their_guards():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            x = self.layer(x)
            return x.square().mean() if x.shape[0] > 50 else x.tanh().mean()

    model = Two()
    for _ in range(2):
        torch._dynamo.reset()
        run = memopt.compile(model, "3MB", backend="inductor")
        for rows in (20, 30, 60, 70, 25):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(run(x), model(x))
            run(x).backward()


@pytest.mark.parametrize("budget", [None, "10MB"])
def test_calls_without_gradients_find_their_code(budget):
    for process in range(2):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Layers().eval()
        counters.clear()
        run = memopt.compile(model, budget, backend="inductor")
        with torch.no_grad():
            for rows in (40, 20, 30):
                x = torch.randn(rows, 8)
                torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-6)
        assert run._memopt.sessions.graphs == 2
        assert not process or counters["inductor"]["fxgraph_cache_miss"] == 0


def test_an_entry_replaces_others_where_it_is_to_be_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(aot_cache.AOTAutogradCache, "_get_tmp_dir_for_key", classmethod(lambda _, key: tmp_path / key))
    (tmp_path / "key").mkdir()
    monkeypatch.setattr(aot_cache.AOTAutogradCache, "save", lambda *_, **__: None)
    aot_cache.write("key", None)
    assert (tmp_path / "key").exists()
    aot_cache.write("key", None, alone=True)
    assert not (tmp_path / "key").exists()
