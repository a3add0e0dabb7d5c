"""Plans on their way to code: what is expected of them comes before code, and no plan becomes code twice."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import memopt
from memopt.inductor import plans as engine
from memopt.inductor.forward_backward import ForwardBackward
from memopt.inductor.plans import KnownPlan, Plans
from memopt.inductor.training import Training
from memopt.passes.checkpoint import Checkpoint
from memopt.step.plan_request import PlanRequest

LIMIT = 1000


class Program:
    """A plan that takes so many bytes."""

    calls = ()

    def __init__(self, taken):
        self.taken = taken


class Hooks:
    """A session whose plans take all the room there is, in steps of 50 bytes, and code that takes `share` of that."""

    def __init__(self, share, least=0, most=9000):
        self.session, self.share, self.least, self.most, self.planned = SimpleNamespace(), share, least, most, []
        self.request = PlanRequest()
        self.hopeless_at = []  # the bytes with which it was asked whether that is hopeless
        self.session.__dict__.update(
            limit_bytes=LIMIT, recomputes=True, one_graph=True, feasible=True,
            judged_as=self.judged_as, forget_plan=lambda: None,
            fallbacks=SimpleNamespace(raise_if_hopeless=lambda _, least: self.hopeless_at.append(least)),
        )  # fmt: skip

    def rewrite(self, joint, num_fwd_outputs, request):
        self.planned.append(min(self.most, max(self.least, (LIMIT + self.request.correction) // 50 * 50)))
        return Program(self.planned[-1])

    def judged_as(self, peak):
        return self.planned[-1] - peak, peak - LIMIT


@pytest.fixture(autouse=True)
def _numbers(request, monkeypatch):
    """Plans are numbers, and so is what is expected of their graphs."""
    if "_compiler" in request.fixturenames:
        return
    monkeypatch.setattr(engine, "fingerprint", lambda program: str(program.taken))
    monkeypatch.setattr(engine, "cut_as_planned", lambda hooks, program, outputs: (program.taken * hooks.share, None))
    monkeypatch.setattr(engine, "expected_bytes", lambda forward, backward, outputs: engine._EXPECTED * forward)
    monkeypatch.setattr(engine, "peak_lower_bound", lambda forward, backward, outputs: forward // 2)


def test_a_plan_whose_code_will_leave_much_is_made_for_more_before_there_is_any():
    hooks = Hooks(0.8)
    forward, _ = Plans(hooks, hooks.request).cut("joint", foresee=True, num_fwd_outputs=1)
    assert hooks.planned == [1000, 1200] and forward == 960
    assert hooks.request.correction == 200, "what comes of the code starts from there"


def test_the_first_plan_stays_where_its_code_will_use_the_budget_or_nothing_else_comes_out():
    assert _planned(Hooks(0.98)) == [1000]
    assert _planned(Hooks(1.04)) == [1000], "code may take what is expected, and says if it is more"
    assert _planned(Hooks(0.8), foresee=False) == [1000], "it was settled with before"
    assert _planned(Hooks(0.8, least=1400)) == [1400]
    assert _planned(Hooks(0.5, most=1000)) == [1000, 1000], "with more room it is the same plan"
    several = Hooks(0.8)
    several.session.one_graph = False
    assert _planned(several) == [1000]


def test_a_plan_whose_code_would_take_too_much_is_made_for_less_before_there_is_any():
    assert _planned(Hooks(1.1)) == [1000, 950]
    assert _planned(Hooks(1.1), foresee=False) == [1000], "it was settled with before"
    hooks = Hooks(1.1, least=1000)
    hooks.session.feasible = False
    assert _planned(hooks) == [1000], "there is no deeper plan"
    assert hooks.hopeless_at == [550]
    assert not Hooks(1.1).hopeless_at, "a plan that keeps the budget is not hopeless"


def test_what_code_took_more_than_was_expected_is_expected_of_the_next_plans():
    hooks = Hooks(1.0)
    plans = Plans(hooks, hooks.request)
    plans.cut("joint", foresee=True, num_fwd_outputs=1)
    plans.code = "first"
    plans.took(1140)
    hooks.request.correction = -50
    plans.cut("joint", foresee=True, num_fwd_outputs=1)
    assert hooks.planned == [1000, 950, 850], "950 * 1.14 are too much"


def test_what_code_took_less_than_was_expected_is_not_held_against_the_next_plans():
    hooks = Hooks(1.2)
    plans = Plans(hooks, hooks.request)
    plans.cut("joint", foresee=True, num_fwd_outputs=1)
    assert hooks.planned == [1000, 800]
    plans.code = "first"
    plans.took(700)  # of 912 that were expected
    hooks.request.correction = 50
    plans.cut("joint", foresee=True, num_fwd_outputs=1)
    assert hooks.planned[2:] == [1050], "1197 are expected, which will be 919"


def test_it_is_foreseen_before_the_first_code_only():
    hooks = Hooks(0.8)
    plans = Plans(hooks, hooks.request)
    plans.cut("joint", foresee=True, num_fwd_outputs=1)
    plans.code, hooks.request.correction = "code", 0
    plans.cut("joint", foresee=True, num_fwd_outputs=1)
    assert hooks.planned == [1000, 1200, 1000], "what the code says is true"


def test_a_plan_that_became_code_does_not_become_it_again():
    hooks = Hooks(0.99)
    plans = Plans(hooks, hooks.request)
    plans.cut("joint", foresee=True, num_fwd_outputs=1)
    assert plans.code is None
    plans.code = "first"
    hooks.request.correction = 100
    plans.cut("joint", foresee=True, num_fwd_outputs=1)
    plans.code = "second"
    for correction, made in ((0, "first"), (120, "second")):
        hooks.request.correction = correction
        with pytest.raises(KnownPlan):
            plans.cut("joint", foresee=True, num_fwd_outputs=1)
        assert plans.code == made


def test_what_hardly_uses_more_room_is_not_worth_code():
    hooks = Hooks(0.9, most=1000)
    plans = Plans(hooks, hooks.request)
    plans.cut("joint", foresee=False, num_fwd_outputs=1)
    plans.code = "first"
    hooks.most = 1005
    hooks.request.correction = -300
    plans.cut("joint", foresee=True, num_fwd_outputs=1)
    assert plans.code is None and hooks.planned == [1000, 700], "less was asked for: that is another plan"
    hooks.request.correction = 300
    with pytest.raises(KnownPlan):
        plans.cut("joint", foresee=True, num_fwd_outputs=1)
    assert plans.code == "first"
    hooks.most = 1050
    plans.cut("joint", foresee=True, num_fwd_outputs=1)
    assert plans.code is None and hooks.planned[2:] == [1005, 1050]


def _planned(hooks, *, foresee=True):
    Plans(hooks, hooks.request).cut("joint", foresee=foresee, num_fwd_outputs=1)
    return hooks.planned


class Blocks(nn.Module):
    """Blocks that keep much, and little of what they keep is needed."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(nn.functional.gelu(layer(x)).sigmoid() * x)
        return x.square().mean()


@pytest.mark.usefixtures("_compiler")
def test_code_is_made_once_for_each_plan(monkeypatch):
    """However a step is corrected: what comes out as before is not lowered again, and what runs is what was judged."""
    model, x = Blocks(), torch.randn(256, 32)
    model(x).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    lowered, made = [], []
    compile_graph, attempt = ForwardBackward.compile, Training._attempt

    def counted(self, module, inputs, **options):
        lowered.append(module)
        return compile_graph(self, module, inputs, **options)

    def twice(self, *, planned):
        first = attempt(self, planned=planned)
        if first is not None and first.route.planned:
            before = len(lowered)
            assert attempt(self, planned=True) is first and len(lowered) == before
            made.append(first)
        return first

    monkeypatch.setattr(ForwardBackward, "compile", counted)
    monkeypatch.setattr(Training, "_attempt", twice)
    compiled = memopt.compile(model, 0.6, backend="inductor", passes=(Checkpoint(),))
    compiled(x).backward()
    assert made and compiled.report.peak_bytes <= compiled.report.budget_bytes
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
