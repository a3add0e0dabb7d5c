"""The choice of an engine for inference: by measured time, under the budget, said in the report."""

import dataclasses
import time

import pytest
import torch
from torch import nn

import memopt
from memopt.backends import choose
from memopt.backends.aten_or_static import AtenOrStaticBackend
from memopt.backends.choose import Chooser, SlowerError, Trial, in_order
from memopt.backends.inductor import InductorBackend
from memopt.backends.static import StaticBackend
from memopt.budget import BudgetError
from memopt.step.inference import Inferred


@pytest.fixture
def _no_compiler(monkeypatch):
    monkeypatch.setattr("memopt.backends.inductor.missing_compiler", lambda device: "no compiler is here")


class Wide(nn.Module):
    """A model whose peak is that of its intermediates, sample by sample."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 512), nn.Linear(512, 16)

    def forward(self, x):
        return self.last(self.first(x).sin().exp())


def trial(name, seconds, peak):
    return Trial(name, lambda args: [], seconds, peak)


def test_the_fastest_comes_first_and_of_equals_the_smaller_one():
    slow, fast, small = trial("slow", 2.0, 1), trial("fast", 1.0, 30), trial("small", 1.01, 20)
    assert [item.name for item in in_order([slow, fast, small])] == ["small", "fast", "slow"]


@pytest.mark.usefixtures("_no_compiler")
def test_without_a_compiler_the_choice_is_between_arena_and_operators():
    model, x = Wide().eval(), torch.randn(8, 16)
    compiled = memopt.compile(model)
    assert isinstance(compiled._memopt.options.engine, AtenOrStaticBackend)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        torch.testing.assert_close(compiled(2 * x), model(2 * x))
    assert compiled.report.backend in ("static", "aten")
    assert any(f"{compiled.report.backend} runs this model" in note for note in compiled.report.notes)
    assert any("static" in note and "aten" in note and " ms" in note for note in compiled.report.notes)


@pytest.mark.usefixtures("_no_compiler")
def test_training_is_as_with_the_aten_backend():
    model, x = Wide(), torch.randn(8, 16)
    compiled = memopt.compile(model)
    compiled(x).sum().backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    torch.testing.assert_close(found, [p.grad for p in model.parameters()])


def test_a_named_backend_is_respected_and_an_engine_may_be_given():
    model, x = Wide().eval(), torch.randn(8, 16)
    for backend in ("static", "aten", StaticBackend()):
        torch._dynamo.reset()
        compiled = memopt.compile(model, backend=backend)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x))
        assert compiled.report.backend == (backend if isinstance(backend, str) else "static")
        assert not any("runs this model" in note for note in compiled.report.notes)


@pytest.mark.usefixtures("_no_compiler")
@pytest.mark.parametrize("backend", [None, "static", "aten"])
def test_a_batch_that_does_not_fit_runs_in_chunks(backend):
    model, x = Wide().eval().double(), torch.randn(64, 16, dtype=torch.float64)
    with torch.no_grad():
        expected = model(x)
        free = memopt.compile(model, backend=backend)
        torch.testing.assert_close(free(x), expected)
        torch._dynamo.reset()
        held = free.report.breakdown.parameters + free.report.breakdown.inputs
        budget = held + (free.report.peak_bytes - held) // 2
        compiled = memopt.compile(model, budget, backend=backend)
        torch.testing.assert_close(compiled(x), expected, rtol=1e-12, atol=1e-12)
    record = next(record for record in compiled.report.passes if record.name == "chunk_batch")
    assert "64 samples in" in record.changes[0].summary
    assert compiled.report.peak_bytes <= budget
    assert (compiled.report.measured_peak_bytes or 0) <= budget


@pytest.mark.usefixtures("_no_compiler")
@pytest.mark.parametrize("backend", [None, "static", "aten"])
def test_the_minimum_is_one_that_works(backend):
    model, x = Wide().eval(), torch.randn(64, 16)
    with torch.no_grad():
        with pytest.raises(BudgetError) as caught:
            memopt.compile(model, "1kB", backend=backend)(x)
        torch._dynamo.reset()
        compiled = memopt.compile(model, caught.value.minimum_bytes, backend=backend)
        torch.testing.assert_close(compiled(x), model(x))


def test_a_batch_that_cannot_be_divided_is_said_in_the_error():
    class Centred(nn.Module):
        def forward(self, x):
            return (x - x.mean(0)).exp()

    with torch.no_grad(), pytest.raises(BudgetError, match=r"cannot be run in chunks: .*which is the batch"):
        memopt.compile(Centred().eval(), "1kB", backend="aten")(torch.randn(64, 64))


@pytest.mark.usefixtures("_no_compiler")
def test_weights_that_change_are_followed():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    x, compiled = torch.randn(2, 3, 8, 8), memopt.compile(model)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
        model[0].weight.mul_(2)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("_no_compiler")
@pytest.mark.parametrize("budget", [None, "1MB"])
def test_a_model_that_refuses_made_up_inputs_is_run_untried(budget):
    class Picks(nn.Module):
        def forward(self, x, index):
            return x.gather(0, index - 3)

    x, index = torch.randn(8), torch.tensor([3, 5, 10])
    compiled = memopt.compile(Picks().eval(), budget)
    with torch.no_grad():
        assert torch.equal(compiled(x, index), x[index - 3])
    assert any("could not be tried" in note for note in compiled._memopt.last.notes)


@pytest.mark.usefixtures("_no_compiler")
def test_a_model_that_checks_its_values_runs_operator_by_operator():
    class Factor(nn.Module):
        def forward(self, x):
            return torch.linalg.cholesky(x)

    x, compiled = 2 * torch.eye(8), memopt.compile(Factor().eval())
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), torch.linalg.cholesky(x))
        with pytest.raises(RuntimeError, match="cholesky"):
            compiled(-x)


def test_engines_over_the_budget_are_passed_over():
    class Record:
        notes: tuple = ()
        backend = ""
        budget = object()
        report = None

        def note(self, text):
            self.notes = (*self.notes, text)

    def settle(peak):
        raise BudgetError(minimum_bytes=peak, budget_bytes=1)

    from tests.passes.build import trace

    program = trace(lambda x: (x.exp(),), torch.randn(8))
    engine = StaticBackend()
    chooser = Chooser(Record(), {"static": engine.bind, "again": engine.bind}, settle)
    with pytest.raises(BudgetError) as caught:
        chooser.bind(program)
    assert caught.value.minimum_bytes > 0


@pytest.mark.usefixtures("_compiler")
def test_the_default_knows_inductor_where_it_can_compile():
    model, x = Wide().eval(), torch.randn(8, 16)
    compiled = memopt.compile(model)
    assert isinstance(compiled._memopt.options.engine, InductorBackend)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    assert compiled.report.backend in ("inductor", "static")
    assert any("inductor" in note and "static" in note for note in compiled.report.notes)


@dataclasses.dataclass
class Written:
    backend: str = ""
    notes: tuple = ()


class Told:
    """A session that remembers what it is told."""

    budget = object()

    def __init__(self):
        self.notes, self.inferred, self.report = (), Inferred(room=10**6), Written()

    def note(self, text):
        self.notes = (*self.notes, text)

    def runs_on(self, backend):
        self.report = dataclasses.replace(self.report, backend=backend, notes=self.notes)


def test_an_engine_that_cannot_run_is_replaced_and_memory_that_ran_out_is_said():
    from tests.passes.build import trace

    program = trace(lambda x: (x.exp(),), torch.randn(8))
    engine, told, settled = StaticBackend(), Told(), []

    def refuses(program):
        raise AssertionError("expected size 3==4")

    def settle(peak, short=False):
        settled.append((peak, short))
        if short:
            raise BudgetError(minimum_bytes=2, budget_bytes=1)

    chooser = Chooser(told, {"fused": refuses}, settle, {"fused": engine.bind})
    assert torch.equal(chooser.bind(program)([torch.ones(8)])[0], torch.ones(8).exp())
    assert settled[0][0] >= 0 and "expected size" in told.notes[0]

    def runs_out(program):
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(BudgetError):
        Chooser(told, {"large": runs_out}, settle).bind(program)
    assert settled[-1] == (None, True)


@pytest.mark.parametrize("fails", ["runs out", "loses its graph"])
def test_what_does_not_run_under_the_limit_is_over_the_budget(monkeypatch, fails):
    from tests.passes.build import trace

    program, told, limit = trace(lambda x: (x.exp(),), torch.randn(8)), Told(), []
    monkeypatch.setattr("memopt.backends.choose.held_bytes", lambda device: 1)

    class Function:
        no_graph = ""

        def __call__(self, args):
            if limit and fails == "runs out":
                raise torch.OutOfMemoryError("no memory")
            self.no_graph = "no memory" if limit else ""
            return [args[0].exp()]

    def settle(peak, short=False):
        limit.append(short)  # from now on, as the trial is over
        if short:
            raise BudgetError(minimum_bytes=2, budget_bytes=1)

    with pytest.raises(BudgetError):
        Chooser(told, {"large": lambda program: Function()}, settle).bind(program)
    assert limit == [False, True]


def test_what_was_measured_over_the_budget_is_planned_for_less():
    told, made = Told(), []
    told.inferred.room = 100

    def make(patient):
        made.append(1)
        if len(made) < 3:
            raise BudgetError(minimum_bytes=120 - 10 * len(made), budget_bytes=100)
        return "fits"

    assert choose.within_budget(told, make) == "fits" and len(made) == 3
    assert told.inferred.spared == 10 + 5, "at least a twentieth of the budget"

    def never(patient):
        made.append(1)
        raise BudgetError(minimum_bytes=2, budget_bytes=1)

    made.clear()
    told.inferred.spared = 0
    with pytest.raises(BudgetError):
        choose.within_budget(told, never)
    assert len(made) == 4, "it is planned for less three times"
    assert told.inferred.spared >= told.inferred.room, "for nothing at last"
    made.clear()
    told.inferred.room = 0
    with pytest.raises(BudgetError):
        choose.within_budget(told, never)
    assert len(made) == 1, "no plan takes less"


def asleep(seconds, take):
    """An engine whose calls take so long and so many bytes."""

    def bind(program):
        def call(args):
            args.clear()
            time.sleep(seconds)
            return [torch.empty(take, dtype=torch.uint8)]

        return call

    return bind


def test_a_much_slower_engine_is_taken_only_after_less_was_planned_for(monkeypatch):
    from tests.passes.build import trace

    monkeypatch.setattr(choose, "_may_wait", lambda program: True)
    program = trace(lambda x: (x.exp(),), torch.randn(8))
    told, tried = Told(), []

    def settle(peak):
        if peak > 100_000:
            raise BudgetError(minimum_bytes=peak, budget_bytes=100_000)

    def make_with(fast):
        def make(patient):
            tried.append((patient, told.inferred.spared))
            engines = {"fast": asleep(0.002, fast(told.inferred.spared)), "slow": asleep(0.1, 50_000)}
            chooser = Chooser(told, engines, settle, patient=patient)
            chooser.bind(program)
            return told.report.backend

        return make

    assert choose.within_budget(told, make_with(lambda spared: 90_000 if spared else 120_000)) == "fast"
    assert [patient for patient, _ in tried] == [True, True] and tried[1][1] >= 20_000
    tried.clear()
    told.inferred.spared = 0
    assert choose.within_budget(told, make_with(lambda spared: 120_000)) == "slow"
    assert [patient for patient, _ in tried] == [True, True, False]


def test_a_plan_for_less_that_is_slower_still_is_taken_back():
    told, tried = Told(), []

    def make(patient):
        tried.append((patient, told.inferred.spared))
        if len(tried) == 1:
            raise SlowerError(1.0, BudgetError(minimum_bytes=120, budget_bytes=100))
        told.inferred.seconds = 2.0
        return len(tried)

    assert choose.within_budget(told, make) == 3
    assert tried == [(True, 0), (True, 20), (False, 0)]


@pytest.mark.usefixtures("_no_compiler")
def test_a_run_that_takes_more_than_was_planned_is_answered_with_chunks(monkeypatch):
    real = choose.run_trial

    def greedy(name, bind, program):
        trial = real(name, bind, program)
        return dataclasses.replace(trial, peak_bytes=2 * trial.peak_bytes)

    monkeypatch.setattr(choose, "run_trial", greedy)
    model, x = Wide().eval(), torch.randn(64, 16)
    with torch.no_grad():
        free = memopt.compile(model)
        free(x)
        torch._dynamo.reset()
        budget = free.report.peak_bytes * 2 // 3  # which its operations keep in chunks, but runs of them do not
        compiled = memopt.compile(model, budget)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    assert any(record.name == "chunk_batch" and record.changes for record in compiled.report.passes)
    assert compiled.report.measured_peak_bytes <= budget


@pytest.mark.parametrize("budget", [40, 90, 119, 125])
def test_what_takes_least_by_its_plan_may_not_when_it_runs(budget):
    """The plan for nothing takes 119 bytes in a run, and others more: a refusal names it, and any more comes to it."""
    told = Told()

    def make(patient):
        inferred = told.inferred
        inferred.room = budget - inferred.spared
        planned, takes = (0, 119) if inferred.room <= 0 else (60, 136)  # the least by plans is 60
        inferred.unused = inferred.room - planned
        if takes > budget:
            raise BudgetError(minimum_bytes=takes, budget_bytes=budget)
        return takes

    if budget >= 119:
        assert choose.within_budget(told, make) == 119
    else:
        with pytest.raises(BudgetError) as refused:
            choose.within_budget(told, make)
        assert refused.value.minimum_bytes == 119
