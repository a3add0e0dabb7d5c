"""Reorder: branches are finished one by one, draws keep their order, and what is not proved best is said."""

import torch
from hypothesis import HealthCheck, given, settings
from torch import nn

import memopt
from memopt.memory.measure import measure
from memopt.memory.timeline import timeline
from memopt.passes.inplace import Inplace
from memopt.passes.reorder import Reorder, in_order, lower_order
from memopt.solve.order import Order, smallest_peak
from tests.generate import recipes
from tests.oracle import program_of
from tests.passes.build import arguments, capture_joint, check, trace
from tests.solve.check_order import check_order
from tests.support import capture


def breadth_first(x):
    """Four branches, each large and then small, written layer by layer."""
    wide = [x.repeat(8, 1) + k for k in range(4)]
    narrow = [w.sum(0) for w in wide]
    return (narrow[0] * narrow[1] * narrow[2] * narrow[3],)


def names(program):
    return [node.name for node in program.calls]


def peak(program):
    return timeline(program).peak_bytes


def test_branches_are_finished_one_after_the_other():
    x = torch.randn(16, 32)
    program = trace(breadth_first, x)
    result = check(Reorder(), program, x)
    assert not result.refusals
    wide = 8 * 16 * 32 * 4
    assert peak(Inplace().run(program).program) == 4 * wide + 32 * 4
    # One at a time, each overwriting its own copy; three small results wait.
    assert peak(Inplace().run(result.program).program) == wide + 2 * 32 * 4
    (change,) = result.changes
    assert "no order needs less" in change.summary and set(change.after) < set(names(result.program))
    values = arguments(program, x)
    assert measure(result.program.run, *values).peak_bytes < measure(program.run, *values).peak_bytes


def test_the_best_order_is_left_alone():
    x = torch.randn(4, 4)
    program = trace(lambda x: (x.exp().sin().cos(),), x)
    assert Reorder().run(program).program is program


def test_views_move_with_nothing_and_keep_their_base_alive():
    def function(x):
        a, b = x.exp(), x.sin()
        rows, columns = a.t(), b[:, :2]
        return rows.sum(0), columns.sum(1)

    x = torch.randn(64, 64)
    program = trace(function, x)
    result = check(Reorder(), program, x)
    assert peak(result.program) == 64 * 64 * 4 + 2 * 64 * 4


def test_items_follow_their_operation():
    def function(x):
        pairs = [torch.ops.aten.topk(x * k, 3) for k in (1, 2, 3)]
        return tuple(values + indices for values, indices in pairs)

    x = torch.randn(64, 64)
    layered = trace(function, x)
    order = sorted(
        (node for node in layered.calls if "getitem" not in node.name),
        key=lambda n: ["mul", "topk", "add"].index(n.name.split("_")[0]),
    )
    program = in_order(layered, order)
    result = check(Reorder(), program, x)
    assert result.changes
    found = names(result.program)
    for k, name in enumerate(found):
        if name.startswith("topk"):
            assert all(item.startswith("getitem") for item in found[k + 1 : k + 3])


def test_draws_keep_their_order():
    def function(x):
        wide = [x.repeat(8, 1) for _ in range(3)]
        noisy = [w + torch.ops.aten.rand_like(w) for w in wide]
        return tuple(n.sum(0) for n in noisy)

    x = torch.randn(16, 32)
    program = trace(function, x)
    result = check(Reorder(), program, x)  # bitwise equal under one seed
    assert peak(result.program) < peak(program)
    draws = [name for name in names(result.program) if name.startswith("rand_like")]
    assert draws == [name for name in names(program) if name.startswith("rand_like")]


def test_annotations_are_forgotten_where_the_order_changes():
    x = torch.randn(16, 32)
    program = Inplace().run(trace(breadth_first, x)).program
    result = Reorder().run(program)
    assert result.changes and not any("inplace" in node.meta for node in result.program.calls)
    chain = Inplace().run(trace(lambda x: (x.exp().sin().cos(),), x)).program
    assert Reorder().run(chain).program is chain


def test_workspace_counts():
    x = torch.randn(8, 8)
    program = trace(lambda x: (x.exp().sum(), x.sin().sum()), x)
    lowered = lower_order(program, {"exp": 1000})
    order = smallest_peak(lowered.problem)
    check_order(lowered.problem, order)
    assert order.peak_bytes == 8 * 8 * 4 + 1000


def test_a_gap_is_said():
    def function(x):
        wide = [x.repeat(k + 1, 1) for k in range(6)]
        pairs = [torch.cat((wide[i], wide[j])).sum(0) for i in range(6) for j in range(i)]
        return (torch.stack(pairs),)

    x = torch.randn(4, 4)
    program = trace(function, x)
    floor = smallest_peak(lower_order(program).problem, effort=0)
    assert floor.lower_bound < floor.peak_bytes
    (refusal,) = check(Reorder(effort=0), program, x).refusals
    assert str(floor.peak_bytes) in refusal.reason and str(floor.lower_bound) in refusal.reason


def test_training_programs_are_left_alone():
    program = capture_joint(lambda x, w: (x @ w).relu().sum(), torch.randn(4, 4), torch.randn(4, 4, requires_grad=True))
    assert Reorder().run(program).program is program


class Cell(nn.Module):
    """A cell of several branches as searched architectures have them, written layer by layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.ModuleList(nn.Conv2d(4, 16, 1) for _ in range(4))
        self.second = nn.ModuleList(nn.Conv2d(16, 2, 3, padding=1) for _ in range(4))

    def forward(self, x):
        wide = [layer(x).relu() for layer in self.first]
        return torch.cat([layer(w) for layer, w in zip(self.second, wide, strict=True)], 1)


def test_a_compiled_cell_peaks_lower_than_eager():
    model, x = Cell().eval(), torch.randn(2, 4, 16, 16)
    compiled = memopt.compile(model, backend="aten")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
        eager, ours = measure(model, x).peak_bytes, measure(compiled, x).peak_bytes
    assert ours < 0.6 * eager
    assert any(record.name == "reorder" and record.changes for record in compiled.report.passes)
    assert peak(Reorder().run(capture(model, x)).program) < peak(capture(model, x))


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(recipe=recipes())
def test_random_programs_never_peak_higher(recipe):
    program = program_of(recipe)
    lowered = lower_order(program)
    order = smallest_peak(lowered.problem, effort=2000)
    assert isinstance(order, Order)
    check_order(lowered.problem, order)
    result = Reorder(effort=2000).run(program)
    assert peak(Inplace().run(result.program).program) <= peak(Inplace().run(program).program)
