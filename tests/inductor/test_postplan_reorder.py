"""together: kernels of a plan that read the same values are one, within the peak, and numbers stay as they are."""

from __future__ import annotations

import torch
from torch._inductor.decomposition import select_decomp_table

from memopt.inductor import postplan_reorder as module
from memopt.inductor.fusion import InductorFusion
from memopt.inductor.prefusion_order import arrange
from memopt.memory.cost.table import CostTable
from memopt.program import Phase
from memopt.solve.rollout import FOREVER, Rollout
from memopt.solve.schedule import Schedule
from memopt.step.encode_step import apply_schedule, lower
from tests.inductor.test_prefusion_order import MODELS, windows
from tests.passes.build import arguments, capture_joint, trace
from tests.support import assert_same

mm = torch.ops.aten.mm.default


def planned(again, name="gated"):
    """A model's program, and the same with some products of its forward graph recomputed just in time."""
    function, tensors = MODELS[name]
    given = tensors()
    program = arrange(capture_joint(function, *given, decompositions=select_decomp_table()))
    program = InductorFusion(CostTable()).mark(program)
    lowering = lower(program, {})
    problem = lowering.problem
    saved = [True] * len(problem.sizes)
    for operation, node in enumerate(lowering.operations):
        if node.name in again:
            saved[problem.writes[operation][0]] = False
    steps = Rollout(problem).play(saved, [FOREVER] * len(saved)).steps
    return given, program, apply_schedule(program, lowering, Schedule(tuple(steps), problem.forward))


def together(program):
    """The program with its backward graph in the order that kernels like better."""
    found = module.together(program)
    if found is None:
        return program
    new = program.copy()
    copies = {node.name: node for node in new.graph.nodes}
    for node in found:
        new.graph.output_node().prepend(copies[node.name])
    return new


def order(program):
    return [node.name for node in program.calls if node.meta["phase"] is Phase.BACKWARD]


def test_kernels_that_read_what_is_computed_again_are_one():
    given, program, with_plan = planned({"mm", "mm_1", "div", "mul"})
    names, new = order(with_plan), together(with_plan)
    new.check()
    assert sorted(order(new)) == sorted(names)
    assert names.index("div_again") < names.index("mm_1_again"), "just before it is read"
    assert order(new).index("div_again") > order(new).index("mm_1_again")

    nodes = {node.name: node for node in with_plan.calls}
    (other,) = (user.name for user in nodes["div_again"].users if user.name != "mul_again")
    one = {other, nodes["mm_17"].args[0].name, "mul_again"}

    def apart(found):
        """Windows that read one of the factors, or the gradient of their product."""
        return [made for window in windows(found) if (made := one & {node.name for node in window})]

    assert len(one) == len(apart(with_plan)) == 3 and apart(new) == [one]
    values = arguments(program, *given)
    assert_same(program.run(*values), new.run(*values))
    assert together(new) is new


def test_programs_without_a_backward_graph_are_returned_as_they_are():
    program = trace(lambda x: (x.sin() @ x,), torch.ones(4, 4))
    assert together(program) is program


def test_the_order_stays_where_the_peak_would_rise(monkeypatch):
    _, _, with_plan = planned({"mm", "mm_1"})
    real = module._Order._play

    def more(self, nodes, live, start):
        before, most = real(self, nodes, live, start)
        return before, most if nodes == self.nodes else [size + 2**20 for size in most]

    monkeypatch.setattr(module._Order, "_play", more)
    assert together(with_plan) is with_plan


def test_a_graph_without_operations_has_no_stretches():
    assert [*module._stretches([])] == []
