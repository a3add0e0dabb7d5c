"""Torch's own cut of a step: what lets it keep a budget, and where it is not tried at all."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import memopt
from memopt.inductor import min_cut_partition
from memopt.inductor import training as engine
from memopt.inductor.min_cut_partition import MinCutPartition
from memopt.step.plan_request import PlanRequest
from tests.inductor.test_peak_lower_bound import Attention, needs_compiler


def cut_of(limit=10_000, lowerings=()):
    """The cut of a step with a limit of so many bytes, of which nothing but the session is real."""
    step = SimpleNamespace(base=0)
    session = SimpleNamespace(limit_bytes=limit, lowerings=lambda: [*lowerings], step=step)
    return MinCutPartition(SimpleNamespace(session=session), PlanRequest())


def test_a_little_too_much_is_saved_less_and_more_is_not():
    cut = cut_of(limit=10_000)
    assert cut.spare(80) and cut.spared == 90  # an eighth more than was lacking
    assert cut.spare(80) and cut.spared == 180
    assert not cut.spare(80) and cut.spared == 180, "more than a fiftieth of the limit"
    assert not cut.spare(0)
    assert cut.spare(40, before=0) and cut.spared == 45


def test_with_rewrites_nothing_is_saved_less():
    cut = cut_of()
    cut.request.lowering = ("chunk_loss",)
    assert not cut.spare(10)


def test_what_lowered_nothing_is_not_done_again():
    cut = cut_of()
    cut.took((), 10_080)
    assert cut.spare(80)
    cut.took((), 10_070)  # 10 bytes for 90 that were not saved
    assert not cut.spare(10)


def test_rewrites_are_tried_one_set_after_the_other_and_again_for_another_limit():
    cut = cut_of(lowerings=["first", "second"])
    cut.spared = 10
    assert cut.next_lowering() and cut.request.lowering == "first" and cut.spared == 0
    assert cut.next_lowering() and cut.request.lowering == "second"
    assert not cut.next_lowering()
    cut.begin_anew()
    assert cut.next_lowering() and cut.request.lowering == "first"


def first_cut(monkeypatch, *, tight, lowerings, fits):
    """What is cut, by its rewrites, and what comes of it, where these sets of rewrites fit and others do not."""
    every, made = ("both", "rewrites"), []
    search = SimpleNamespace(all_lowering=lambda: every)
    session = SimpleNamespace(limit_bytes=10_000, lowerings=lambda: [*lowerings], kept_search=search, tight=tight)
    rewritten = []
    hooks = SimpleNamespace(session=session, rewrite=lambda joint, outputs, request: rewritten.append(request.lowering))
    cut = MinCutPartition(hooks, PlanRequest())

    def made_with(self, joint, inputs, **options):
        hooks.rewrite(joint, 1, self.request)
        made.append(self.request.lowering)
        return ("graphs", self.request.lowering) if self.request.lowering in fits else None

    monkeypatch.setattr(MinCutPartition, "cut", made_with)
    monkeypatch.setattr(MinCutPartition, "_computes_much_again", lambda self, joint, outputs: False)
    graphs = cut.first_cut(None, (), num_fwd_outputs=1)
    assert graphs is None or rewritten[-1] == graphs[1], "what is on record is what was cut last"
    return made, graphs


@pytest.mark.parametrize("tight", [False, True])
def test_the_cut_with_all_rewrites_is_made_once(monkeypatch, tight):
    every = ("both", "rewrites")
    made, graphs = first_cut(monkeypatch, tight=tight, lowerings=[("both",), every], fits=[every])
    assert made == ([every, (), ("both",)] if tight else [(), every, ("both",)]) and graphs == ("graphs", every)


@pytest.mark.parametrize("tight", [False, True])
def test_where_all_rewrites_are_not_enough_no_others_are_tried(monkeypatch, tight):
    every = ("both", "rewrites")
    made, graphs = first_cut(monkeypatch, tight=tight, lowerings=[("both",), every], fits=[])
    assert made == ([every] if tight else [(), every]) and graphs is None


@pytest.mark.quick("2.0")
@needs_compiler
@pytest.mark.parametrize("times", [0.5, 2.0])
def test_code_that_took_more_than_expected_lets_other_cuts_be_given_up(monkeypatch, times):
    """Without rewrites nothing is over the budget; had its code been, others' would be made only if they took less."""
    found, plain = [], MinCutPartition.cut

    def cut(self, *args, **options):
        first = plain(self, *args, **options)
        self.took((), self.session.step.base + int(times * self._expected))
        self._taken.clear()
        found.append((first is None, plain(self, *args, **options) is None))
        return first

    monkeypatch.setattr(MinCutPartition, "cut", cut)
    torch._dynamo.reset()
    model, x = nn.Sequential(Attention(), Attention()), torch.randn(4, 32, 64)
    report = memopt.plan(model, x, backend="inductor")
    torch._dynamo.reset()
    memopt.compile(model, int(1.3 * report.peak_bytes), backend="inductor")(x).square().mean().backward()
    assert found[-1] == (False, times == 2.0)


class Squared(nn.Sequential):
    """Layers and their loss: none of the caller's is allowed for."""

    def forward(self, x):
        return super().forward(x).square().mean()


@needs_compiler
@pytest.mark.parametrize("much", [0.02, 1.0])
def test_where_a_plan_must_compute_products_again_torch_s_own_cut_is_not_made(monkeypatch, tmp_path, much):
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))
    made, plain = [], MinCutPartition.cut
    monkeypatch.setattr(
        MinCutPartition, "cut", lambda self, *args, **options: made.append(1) or plain(self, *args, **options)
    )
    monkeypatch.setattr(min_cut_partition, "_MUCH", much)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Squared(*(nn.Linear(32, 32, bias=False) for _ in range(12)))
    x = torch.randn(4096, 32)
    model(x).backward()
    wanted = [weight.grad for weight in model.parameters()]
    model.zero_grad(set_to_none=True)
    run = memopt.compile(model, "3MB", backend="inductor")  # each product is 0.5 MB
    run(x).backward()
    assert bool(made) == (much == 1.0)
    assert run.report.peak_bytes <= run.report.budget_bytes
    torch.testing.assert_close([weight.grad for weight in model.parameters()], wanted)


@pytest.mark.long
@needs_compiler
def test_a_cut_that_is_expected_to_be_too_much_is_not_made(monkeypatch):
    torch._dynamo.reset()
    model = nn.Sequential(*(Attention() for _ in range(4)))
    x = torch.randn(8, 64, 64)
    free = memopt.compile(model, backend="inductor")
    free(x).square().mean().backward()
    model.zero_grad(set_to_none=True)
    torch._dynamo.reset()
    made, plain = [], min_cut_partition.MinCutPartition.cut

    def cut(self, *args, **options):
        made.append(plain(self, *args, **options))
        return made[-1]

    monkeypatch.setattr(min_cut_partition.MinCutPartition, "cut", cut)
    monkeypatch.setattr(min_cut_partition, "saved_bytes", lambda *args: 0)
    monkeypatch.setattr(min_cut_partition, "peak_lower_bound", lambda *args: 0)
    run = memopt.compile(model, int(0.8 * free.report.peak_bytes), backend="inductor")
    run(x).square().mean().backward()
    assert made and all(graphs is None for graphs in made) and run.report.peak_bytes <= run.report.budget_bytes


@needs_compiler
def test_code_of_a_cut_that_may_be_too_much_keeps_no_buffer_for_the_next(monkeypatch):
    model = nn.Sequential(Attention())
    x, asked, plain = torch.randn(8, 64, 64), [], engine.free_at_once
    monkeypatch.setattr(engine, "free_at_once", lambda policy: (asked.append(True), plain(policy)))

    def peak(budget):
        torch._dynamo.reset()
        model.zero_grad(set_to_none=True)
        run = memopt.compile(model, budget, backend="inductor")
        run(x).square().mean().backward()
        return run.report.peak_bytes

    ample = peak("4GB")
    assert not asked, "there is room"
    monkeypatch.setattr(min_cut_partition, "expected_bytes", lambda *cut: 2 * ample)
    monkeypatch.setattr(min_cut_partition, "_LESS", 0)
    assert peak(ample) <= ample and asked
