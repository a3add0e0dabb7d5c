"""With the rewrites that reduce the minimum, or without: chosen by what the plans cost, and kept as promised."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memopt
from memopt.passes.chunk_loss import ChunkLoss
from memopt.step.curve import CurvePoint
from memopt.step.option_scoring import WORTH, acceptable, cheapest, joined
from memopt.step.planner import StepPlan
from tests.end_to_end import gradients, resident_bytes, restorer, step

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


TOKENS, WIDTH, WORDS = 256, 16, 1000


class Words(nn.Module):
    """Next-word prediction in which the logits are by far the largest tensor; dropout before them."""

    def __init__(self, *, broken: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))] * 3)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.broken = broken

    def forward(self, ids):
        x = self.body(self.embedding(ids))
        if self.broken:
            torch._dynamo.graph_break()
        return F.cross_entropy(self.head(x), ids.roll(-1))


def make(dtype=torch.float32, **options):
    torch.manual_seed(0)
    return Words(**options).to(dtype), {"ids": torch.randint(0, WORDS, (TOKENS,))}


def minimum(passes=None, **options):
    """The least bytes of the step with these passes."""
    torch._dynamo.reset()
    model, inputs = make(**options)
    compiled = memopt.compile(model, backend="aten", passes=passes, verify=False, example_inputs=inputs)
    return compiled.report.minimum_bytes


def without():
    return tuple(item for item in memopt.TRAINING if not item.lowers_floor)


def chunked(report):
    """How many losses the report says are computed in chunks, and why others are not."""
    records = [record for record in report.passes if record.name == ChunkLoss.name]
    return sum(len(r.changes) for r in records), [refusal.reason for r in records for refusal in r.refusals]


@pytest.mark.quick("False")
@pytest.mark.parametrize("broken", [False, True])
def test_the_minimum_is_that_with_the_rewrites_and_can_be_had(broken):
    low, high = minimum(broken=broken), minimum(without(), broken=broken)
    assert low < 0.6 * high
    budget = int(1.02 * low)
    exact, inputs = make(torch.float64, broken=broken)
    true = [step(exact, inputs), *gradients(exact)]
    model, inputs = make(broken=broken)
    restore = restorer(model)
    plain = [step(model, inputs), *gradients(model)]
    restore()
    torch._dynamo.reset()
    compiled = memopt.compile(model, budget, backend="aten", example_inputs=inputs)
    for _ in range(2):
        restore()
        found = [step(compiled, inputs), *gradients(model)]
        for new, old, reference in zip(found, plain, true, strict=True):
            floor = 8 * torch.finfo(torch.float32).eps * reference.abs().max()
            assert (new - reference).abs().max() <= 2 * (old - reference).abs().max() + floor
    restore()
    measured = resident_bytes(model, inputs) + memopt.measure(step, compiled, inputs).peak_bytes
    assert measured <= budget
    assert compiled.report.minimum_bytes <= budget
    assert chunked(compiled.report) == (1, [])
    (record,) = [r for r in compiled.report.passes if r.name == "chunk_loss" and r.changes]
    # What the rewrite spares is what its proof would take: it must not be had inside this budget.
    assert record.evidence.regions == 1 and record.evidence.proved == 0
    assert "the region takes" in record.evidence.unproved[0]


def test_a_budget_that_is_met_without_them_leaves_the_numbers_alone():
    model, inputs = make()
    restore = restorer(model)
    plain = [step(model, inputs), *gradients(model)]
    restore()
    compiled = memopt.compile(model, 1.0, backend="aten")
    assert [step(compiled, inputs).equal(plain[0]), *map(torch.equal, gradients(model), plain[1:])] == [True] * len(
        plain
    )
    assert chunked(compiled.report) == (0, ["not used: the plan without it keeps the budget at no more time"])
    assert compiled.report.minimum_bytes == minimum()


def test_no_plan_at_all_names_the_lower_minimum():
    low = minimum()
    model, inputs = make()
    with pytest.raises(memopt.BudgetError) as refused:
        memopt.plan(model, inputs, low // 2)
    named = refused.value.minimum_bytes
    assert low // 2 < named < low  # smaller chunks are tried where nothing else fits
    report = memopt.plan(model, inputs, named)
    assert report.peak_bytes <= named
    (record,) = [r for r in report.passes if r.name == "chunk_loss"]
    assert "32 chunks" in record.changes[0].summary


def test_without_a_plan_passes_are_applied_as_they_are_given():
    model, inputs = make()
    report = memopt.compile(
        model, backend="aten", passes=(memopt.TRAINING[0], ChunkLoss()), example_inputs=inputs
    ).report
    assert chunked(report) == (1, [])
    (record,) = [r for r in report.passes if r.name == "chunk_loss"]
    assert record.evidence.proved == record.evidence.regions == 1


# -- the rule ---------------------------------------------------------------------------------------------------------


def plan(seconds, extra, *, feasible=True, minimum=10, curve=()):
    return StepPlan((), 20, minimum, feasible, seconds, extra, curve)


@pytest.mark.parametrize(
    ("without", "expected"),
    [
        (plan(1.0, 0.0), True),
        (plan(1.0 + WORTH, WORTH), True),
        (plan(1.1, 0.1), False),
        (plan(1.0, 0.0, feasible=False), False),
    ],
)
def test_a_plan_that_costs_next_to_nothing_is_taken_as_it_is(without, expected):
    assert acceptable(without) is expected


@pytest.mark.parametrize(
    ("plans", "expected"),
    [
        ([plan(1.5, 0.5), plan(1.2, 0.0)], 1),
        ([plan(1.5, 0.5), plan(1.5, 0.0)], 0),
        ([plan(1.5, 0.5), plan(1.2, 0.0, feasible=False)], 0),
        ([plan(1.0, 0.0, feasible=False), plan(9.0, 1.0), plan(8.0, 1.0)], 2),
        ([plan(1.0, 0.0, feasible=False, minimum=5), plan(2.0, 0.0, feasible=False, minimum=4)], 1),
        ([plan(1.0, 0.0, feasible=False, minimum=4), plan(0.5, 0.0, feasible=False, minimum=4)], 0),
    ],
)
def test_the_feasible_cheaper_plan_is_taken_and_of_equal_ones_the_first(plans, expected):
    assert cheapest(plans) == expected


def test_of_several_rewrites_one_that_costs_more_than_it_helps_is_left_out():
    class Vain(memopt.Pass):
        """Negates a value twice: more time, no less memory."""

        name = "vain"
        lowers_floor = True

        def run(self, program):
            new = program.copy()
            node = next(n for n in new.calls if n.target is torch.ops.aten.gelu.default)
            with new.graph.inserting_after(node):
                twice = new.graph.call_function(torch.ops.aten.neg.default, (node,))
            with new.graph.inserting_after(twice):
                back = new.graph.call_function(torch.ops.aten.neg.default, (twice,))
            for extra in (twice, back):
                extra.meta["phase"] = node.meta["phase"]
            node.replace_all_uses_with(back, delete_user_cb=lambda user: user is not twice)
            return memopt.PassResult(new.finish(), (memopt.Change("negated twice", (node.name,), (back.name,)),))

    model, inputs = make()
    *early, checkpoint, inplace = without()
    passes = (*early, Vain(), ChunkLoss(), checkpoint, inplace)
    budget = int(1.1 * minimum((*early, ChunkLoss(), checkpoint, inplace)))
    compiled = memopt.compile(model, budget, backend="aten", passes=passes, example_inputs=inputs)
    found = {r.name: (len(r.changes), len(r.refusals)) for r in compiled.report.passes}
    assert found["chunk_loss"] == (1, 0) and found["vain"] == (0, 1)
    step(compiled, inputs)


def test_the_curve_is_that_of_both_plans():
    chosen = plan(1.0, 0.0, minimum=6, curve=(CurvePoint(10, 1.0, 0.0, True), CurvePoint(6, 2.0, 1.0)))
    other = plan(1.0, 0.0, minimum=3, curve=(CurvePoint(9, 1.5, 0.0, True), CurvePoint(3, 3.0, 1.0)))
    both = joined(chosen, [other])
    assert both.minimum_bytes == 3
    assert both.curve == (
        CurvePoint(10, 1.0, 0.0, True),
        CurvePoint(9, 1.5, 0.5),
        CurvePoint(6, 2.0, 1.0),
        CurvePoint(3, 3.0, 2.0),
    )
