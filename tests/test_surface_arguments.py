"""Arguments of memopt.compile: budgets, examples, passes of one's own, verification."""

import pytest
import torch

import memopt
from tests.end_to_end import build, step
from tests.test_surface import Small, X, compiled, gradients_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize(
    "budget", ["20", "20XB", "-1GB", "nan", "", "0GB", 0, -5, True, 1.5, 0.0, float("nan"), float("inf"), [], "5 B B"]
)
def test_bad_budgets_are_refused_in_one_line(budget):
    with pytest.raises(ValueError, match="budget") as caught:
        compiled(Small(), budget)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"backend": "nowhere"}, ValueError, "unknown backend 'nowhere'.*aten.*inductor"),
        ({"allow": ("offload",)}, ValueError, "unknown lever 'offload'"),
        ({"verify": "half"}, ValueError, "verify"),
        ({"passes": ("fuse",)}, TypeError, "memopt.Pass"),
    ],
    ids=["backend", "allow", "verify", "passes"],
)
def test_arguments_that_are_not_understood(options, error, message):
    with pytest.raises(error, match=message) as caught:
        memopt.compile(Small(), **{"backend": "aten", **options})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model", [torch.relu, None, "gpt2"])
def test_something_that_is_no_module(model):
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module"):
        compiled(model)


def test_a_model_is_not_compiled_twice():
    with pytest.raises(TypeError, match="compiled already"):
        compiled(compiled(Small()))


@pytest.mark.parametrize("form", ["tuple", "mapping", "tensor"])
def test_example_inputs(form):
    given = {"tuple": (X,), "mapping": {"x": X}, "tensor": X}[form]
    run = compiled(Small(), "1MB", example_inputs=given)
    assert run.report.budget_bytes == 1_000_000


def test_no_passes_at_all():
    model = Small()
    run = compiled(model, passes=())
    _, expected = gradients_of(model, model, X)
    _, found = gradients_of(run, model, X)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert run.report.passes == ()
    with pytest.raises(memopt.BudgetError) as caught:
        compiled(model, run.report.peak_bytes - 1, passes=())(X)
    assert caught.value.minimum_bytes == run.report.peak_bytes


class TanhTwice(memopt.Pass):
    """A user's pass: swaps tanh for another function of the same shape."""

    name = "swap_tanh"

    def __init__(self, target):
        self.target = target

    def run(self, program):
        new = program.copy()
        found = [node for node in new.graph.nodes if node.target is torch.ops.aten.tanh.default]
        if not found:
            return memopt.PassResult(program)
        for node in found:
            with new.graph.inserting_before(node):
                after = new.graph.call_function(self.target, node.args)
                after.meta.update(node.meta)
            node.replace_all_uses_with(after)
            new.graph.erase_node(node)
        changes = (memopt.Change("swapped", tuple(node.name for node in found)),)
        return memopt.PassResult(new.finish(), changes)


def test_a_user_s_own_pass_runs_and_is_on_record():
    model = Small().eval()
    run = compiled(model, passes=[TanhTwice(torch.ops.aten.sin.default)], verify=False)
    with torch.no_grad():
        torch.testing.assert_close(run(X), model.second(model.first(X).sin()))
    (record,) = run.report.passes
    assert record.name == "swap_tanh" and len(record.changes) == 1 and record.evidence is None


@pytest.mark.parametrize("verify", [True, "full"])
def test_a_user_s_pass_that_changes_the_numbers_is_caught(verify):
    run = compiled(Small().eval(), passes=[TanhTwice(torch.ops.aten.sin.default)], verify=verify)
    with torch.no_grad(), pytest.raises(memopt.PassError, match="swap_tanh"):
        run(X)


def test_full_verification():
    model = Small()
    run = compiled(model, 1.0, verify="full")
    _, expected = gradients_of(model, model, X)
    _, found = gradients_of(run, model, X)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    changed = [record for record in run.report.passes if record.changes]
    assert changed and all(record.evidence.scope == "program" for record in changed if record.evidence.regions)


def test_an_optimizer_s_step_is_inside_the_budget():
    model, inputs = build("gpt2")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    run = compiled(model, optimizer=optimizer)
    parameters = list(model.parameters())

    def whole():
        optimizer.zero_grad()
        step(run, inputs)
        optimizer.step()

    whole()
    report = run.report
    size = sum(p.numel() * p.element_size() for p in parameters)
    state = sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values())
    assert report.breakdown.optimizer_state == state == 2 * size + 4 * len(parameters)
    optimizer.zero_grad()
    resident = size + state + sum(t.numel() * t.element_size() for t in (*model.buffers(), *inputs.values()))
    measured = resident + memopt.measure(whole).peak_bytes
    assert report.peak_bytes == pytest.approx(measured, rel=0.02)
