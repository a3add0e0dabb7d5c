"""A step in plain numbers and back: what the solvers are told, and that any schedule of theirs computes the same."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from memopt.memory.timeline import timeline
from memopt.passes.eliminate_copies import EliminateCopies
from memopt.passes.eliminate_dead import EliminateDead
from memopt.program import OutputKind, Phase, Program
from memopt.solve.check import check
from memopt.solve.schedule import Schedule, simulate
from memopt.step.encode_step import Lowering, again_form, apply_schedule, lower
from memopt.torch_compat.autograd_nodes import gradients_are_held
from tests.passes.build import arguments, capture_joint, trace
from tests.support import assert_same

aten = torch.ops.aten
X = torch.linspace(-1, 1, 24).reshape(4, 6)
W = torch.linspace(-1, 1, 36).reshape(6, 6)


@dataclasses.dataclass(frozen=True)
class Cost:
    seconds: float
    workspace_bytes: int


def joint(function: Callable[..., tuple[torch.Tensor, ...]], *more: torch.Tensor) -> Program:
    program = capture_joint(function, X, W.clone().requires_grad_(), *more)
    return EliminateDead().run(EliminateCopies().run(program).program).program  # no detach nodes


def operation(lowering: Lowering, name: str) -> int:
    return [node.name for node in lowering.operations].index(name)


def with_again(lowering: Lowering, *names: str, before: str) -> Schedule:
    """The schedule that runs the named operations once more, right before another one."""
    steps = list(range(len(lowering.operations)))
    place = operation(lowering, before)
    again = [operation(lowering, name) for name in names]
    return Schedule((*steps[:place], *again, *steps[place:]), lowering.problem.forward)


def plain(lowering: Lowering) -> Schedule:
    return Schedule(tuple(range(len(lowering.operations))), lowering.problem.forward)


def chain(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return ((x @ w).sin().exp(),)


# -- in plain numbers --------------------------------------------------------------------------------------------------


def test_the_numbers_of_a_chain() -> None:
    program = joint(chain)
    lowering = lower(program, {"sin": Cost(3.0, 100), "cos": Cost(5.0, 0)})
    problem, names = lowering.problem, [node.name for node in lowering.operations]
    assert names == ["mm", "sin", "exp", "tangents_1", "mul", "cos", "mul_1", "mm_1"]
    assert problem.forward == 3
    maker = [names[producer] if producer >= 0 else "" for producer in problem.producer]
    reads = {name: {maker[s] for s in read} for name, read in zip(names, problem.reads, strict=True)}
    assert reads == {
        "mm": {""},
        "sin": {"mm"},
        "exp": {"sin"},
        "tangents_1": set(),
        "mul": {"tangents_1", "exp"},
        "cos": {"mm"},
        "mul_1": {"mul", "cos"},
        "mm_1": {"", "mul_1"},
    }
    sizes = [problem.sizes[s] for name in names for s in problem.writes[names.index(name)]]
    assert sizes == [X.nbytes] * 7 + [W.nbytes]
    assert problem.costs == (0.0, 3.0, 0.0, 0.0, 0.0, 5.0, 0.0, 0.0)
    assert problem.workspace == (0, 100, 0, 0, 0, 0, 0, 0)
    assert problem.recomputable == (True, True, True, False, True, True, True, True)
    assert {maker[s] for s in problem.pinned} == {"exp", "mm_1"} | ({"tangents_1"} if gradients_are_held() else set())
    assert {problem.sizes[s] for s in problem.resident} == {X.nbytes, W.nbytes}
    assert all(maker[s] == "" for s in problem.resident)


def test_views_are_no_operations_and_read_their_base() -> None:
    lowering = lower(joint(lambda x, w: ((x @ w).view(24)[:12].sin(),)), {})
    names = [node.name for node in lowering.operations]
    assert names[:2] == ["mm", "sin"]
    (read,) = lowering.problem.reads[1]
    assert lowering.problem.producer[read] == 0 and lowering.problem.sizes[read] == X.nbytes


def test_a_multiple_result_is_one_operation_with_several_storages() -> None:
    lowering = lower(joint(lambda x, w: (F.layer_norm(x @ w, (6,)).sin(),)), {})
    index = operation(lowering, "native_layer_norm")
    assert [lowering.problem.sizes[s] for s in lowering.problem.writes[index]] == [X.nbytes, 16, 16]


def test_all_tangents_arrive_at_once() -> None:
    lowering = lower(joint(lambda x, w: ((x @ w).sin(), (x @ w).exp())), {})
    arrivals = [node.name for node in lowering.operations if node.op == "placeholder"]
    assert len(arrivals) == 1
    index = operation(lowering, arrivals[0])
    assert index == lowering.problem.forward and len(lowering.problem.writes[index]) == 2


def test_random_operations_run_once() -> None:
    program = joint(lambda x, w: (F.dropout((x @ w).sin(), 0.5).exp(),))
    lowering = lower(program, {})
    drawn = [n for n, ok in zip(lowering.operations, lowering.problem.recomputable, strict=True) if not ok]
    (name,) = [node.name for node in drawn if node.op != "placeholder"]
    assert "dropout" in name or "bernoulli" in name or "rand" in name


def test_what_reads_a_mutated_input_runs_once() -> None:
    def function(x, w, total):
        y = (x @ w + total).sin()
        total.add_(1)
        return (y.exp() * total,)

    program = joint(function, torch.zeros(4, 6))
    (mutated,) = [output.target for output in program.outputs if output.kind is OutputKind.MUTATION]
    lowering = lower(program, {})
    readers = [
        operation(lowering, node.name)
        for node in program.calls
        if mutated in [argument.name for argument in node.all_input_nodes]
    ]
    assert readers and not any(lowering.problem.recomputable[index] for index in readers)
    assert lowering.problem.recomputable[operation(lowering, "sin")]


def norm(training: bool) -> Program:
    def function(x, w, mean, var):
        return (F.batch_norm(x @ w, mean, var, training=training).sin(),)

    return joint(function, torch.zeros(6), torch.ones(6))


def test_batch_norm_in_training_runs_again_without_running_statistics() -> None:
    program = norm(True)
    lowering = lower(program, {})
    (node,) = [n for n in lowering.operations if "batch_norm_legit_functional" in str(n.target)]
    assert lowering.problem.recomputable[operation(lowering, node.name)]
    target, args = again_form(node)
    assert target is aten._native_batch_norm_legit.no_stats
    mm = next(n for n in program.calls if n.name == "mm")
    assert args == (mm, None, None, True, node.args[6], node.args[7])


def test_batch_norm_on_running_statistics_does_not_run_again_as_if_in_training() -> None:
    program = norm(True)
    (node,) = [n for n in program.calls if "batch_norm_legit_functional" in str(n.target)]
    node.args = (*node.args[:5], False, *node.args[6:])
    assert again_form(node) is None


def test_an_input_that_is_returned_is_resident_and_not_pinned() -> None:
    lowering = lower(joint(lambda x, w: ((x @ w).sin(), x.view(24))), {})
    assert not lowering.problem.pinned & lowering.problem.resident


def test_what_may_run_again() -> None:
    program = trace(lambda x: (torch.bernoulli(x.abs().clamp(max=1)), x.sin()), X)
    forms = {node.name: again_form(node) for node in program.calls}
    assert forms["bernoulli"] is None
    (sin,) = [node for node in program.calls if node.name == "sin"]
    assert forms["sin"] == (aten.sin.default, sin.args)
    (sin.args, target) = (sin.args, torch.ops.higher_order.cond)
    sin.target = target
    assert again_form(sin) is None


# -- and back ----------------------------------------------------------------------------------------------------------


def calls(program: Program) -> list[str]:
    return [node.name for node in program.calls if "getitem" not in node.name]


def assert_computes_the_same(before: Program, after: Program, *tensors: torch.Tensor) -> None:
    values = arguments(before, *tensors)
    found = []
    for program in (before, after):
        torch.manual_seed(0)
        found.append(program.run(*values))
    after.check()
    assert_same(found[1], found[0])


def test_nothing_recomputed_is_the_same_program() -> None:
    program = joint(chain)
    lowering = lower(program, {})
    again = apply_schedule(program, lowering, plain(lowering))
    assert [(n.name, n.meta["phase"]) for n in again.calls] == [(n.name, n.meta["phase"]) for n in program.calls]
    assert again.inputs == program.inputs and again.outputs == program.outputs
    assert_computes_the_same(program, again, X, W)


def test_a_recomputed_node_is_a_copy_in_backward() -> None:
    program = joint(chain)
    text = str(program.graph)
    lowering = lower(program, {})
    again = apply_schedule(program, lowering, with_again(lowering, "mm", before="cos"))
    assert calls(again) == ["mm", "sin", "exp", "mul", "mm_again", "cos", "mul_1", "t", "mm_1"]
    copy = next(node for node in again.calls if node.name == "mm_again")
    original = next(node for node in again.calls if node.name == "mm")
    assert (copy.target, copy.args) == (original.target, original.args)
    assert copy.meta["recomputes"] == "mm" and copy.meta["phase"] is Phase.BACKWARD
    assert [user.name for user in copy.users] == ["cos"] and [user.name for user in original.users] == ["sin"]
    assert "recomputes" not in original.meta
    assert_computes_the_same(program, again, X, W)
    assert str(program.graph) == text, "the program given was edited"


def test_what_forward_makes_for_backward_alone_is_not_made_there_when_backward_makes_it_again() -> None:
    program = joint(chain).copy()
    cos, exp = (next(node for node in program.calls if node.name == name) for name in ("cos", "exp"))
    exp.append(cos)
    cos.meta["phase"] = Phase.FORWARD
    program = program.finish()
    lowering = lower(program, {})
    assert calls(apply_schedule(program, lowering, plain(lowering)))[:4] == ["mm", "sin", "exp", "cos"]
    again = apply_schedule(program, lowering, with_again(lowering, "cos", before="mul_1"))
    assert calls(again) == ["mm", "sin", "exp", "mul", "cos_again", "mul_1", "t", "mm_1"]
    assert timeline(again).saved_bytes == timeline(joint(chain)).saved_bytes
    assert_computes_the_same(program, again, X, W)


def test_a_value_may_be_recomputed_for_each_of_its_uses() -> None:
    def twice(x, w):
        y = (x @ w).sin()
        return (y.exp(), y.cos())

    program = joint(twice)
    lowering = lower(program, {})
    steps = list(range(len(lowering.operations)))
    sin = operation(lowering, "sin")
    forward, backward = steps[: lowering.problem.forward], steps[lowering.problem.forward :]
    order = [step for other in backward[1:] for step in (sin, other)]
    again = apply_schedule(program, lowering, Schedule((*forward, backward[0], *order), lowering.problem.forward))
    copies = [node for node in again.calls if node.meta.get("recomputes") == "sin"]
    assert all(copy.users for copy in copies), "copies that nobody reads are dropped"
    assert not any(user.meta["phase"] is Phase.BACKWARD for n in again.calls if n.name == "sin" for user in n.users)
    assert len({node.name for node in again.graph.nodes}) == len(list(again.graph.nodes))
    assert_computes_the_same(program, again, X, W)


def test_views_are_rebuilt_so_that_whole_storages_cross() -> None:
    program = joint(lambda x, w: ((x @ w).view(24)[:12].sin(),))
    lowering = lower(program, {})
    again = apply_schedule(program, lowering, plain(lowering))
    crossing = [
        node.name
        for node in again.calls
        if node.meta["phase"] is Phase.FORWARD and any(u.meta.get("phase") is Phase.BACKWARD for u in node.users)
    ]
    assert crossing == ["mm"]
    assert_computes_the_same(program, again, X, W)
    before = [
        node.name
        for node in program.calls
        if node.meta["phase"] is Phase.FORWARD and any(u.meta.get("phase") is Phase.BACKWARD for u in node.users)
    ]
    assert before != crossing


def test_running_statistics_move_once() -> None:
    program = norm(True)
    lowering = lower(program, {})
    (name,) = [n.name for n in lowering.operations if "batch_norm_legit_functional" in str(n.target)]
    (before,) = [n.name for n in lowering.operations if "batch_norm_backward" in str(n.target)]
    again = apply_schedule(program, lowering, with_again(lowering, "mm", name, before=before))
    copies = [node for node in again.calls if node.meta.get("recomputes") == name and node.name == f"{name}_again"]
    assert [copy.target for copy in copies] == [aten._native_batch_norm_legit.no_stats]
    assert {item.args[1] for item in copies[0].users} <= {0, 1, 2}
    assert_computes_the_same(program, again, X, W, torch.zeros(6), torch.ones(6))


def test_a_view_is_rebuilt_from_each_copy_of_its_base() -> None:
    def function(x, w):
        y = (x @ w).view(6, 4)
        return (y.sin() + y.cos(),)

    program = joint(function)
    lowering = lower(program, {})
    backward = [node.name for node in lowering.operations[lowering.problem.forward + 1 :]]
    readers = [name for name in backward if name.startswith(("cos", "sin"))]
    steps = list(range(len(lowering.operations)))
    for name in readers:
        steps.insert(steps.index(operation(lowering, name)), operation(lowering, "mm"))
    again = apply_schedule(program, lowering, Schedule(tuple(steps), lowering.problem.forward))
    copies = [node for node in again.calls if node.meta.get("recomputes") == "mm"]
    assert len(copies) >= 2 and all([str(u.target) for u in copy.users] == ["aten.view.default"] for copy in copies)
    assert_computes_the_same(program, again, X, W)


def test_random_numbers_that_nobody_reads_are_still_drawn_in_backward() -> None:
    program = joint(chain).copy()
    with program.graph.inserting_before(program.graph.output_node()):
        drawn = program.graph.call_function(aten.rand.default, ([2],), {"device": torch.device("cpu")})
    drawn.meta["phase"] = Phase.BACKWARD
    program = program.finish()
    lowering = lower(program, {})
    again = apply_schedule(program, lowering, plain(lowering))
    assert [node.name for node in again.calls if node.target is aten.rand.default] == [drawn.name]


def test_the_first_copy_of_what_the_caller_holds_is_the_one_returned() -> None:
    program = joint(chain)
    lowering = lower(program, {})
    steps = (*range(len(lowering.operations)), operation(lowering, "mm_1"))
    again = apply_schedule(program, lowering, Schedule(steps, lowering.problem.forward))
    assert [getattr(value, "name", None) for value in again.output_nodes] == [
        getattr(value, "name", None) for value in program.output_nodes
    ]
    assert calls(again) == calls(program)
    again = apply_schedule(program, lowering, with_again(lowering, "exp", before="mul"))
    assert again.output_nodes[0].name == "exp"
    assert_computes_the_same(program, again, X, W)


def layers(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = F.layer_norm(x @ w, (6,)).view(2, 2, 6)
    z = F.dropout(F.gelu(y @ w.t()), 0.4).flatten(0, 1)
    return (z.sin() + (z.exp() @ w)[:, 1:2].expand(4, 6), y.cos())


def attention(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    q, k, v = ((x @ w * n).view(1, 4, 2, 3).transpose(1, 2) for n in (1.0, 2.0, 3.0))
    return (F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(4, 6).sin(),)


def normalized(x: torch.Tensor, w: torch.Tensor, mean: Any, var: Any) -> tuple[torch.Tensor, ...]:
    y = F.batch_norm(x @ w, mean, var, training=True, momentum=0.3)
    return (F.batch_norm(y.relu() @ w, mean, var, training=True).sin() * y,)


@pytest.mark.parametrize(
    ("function", "more"),
    [(chain, ()), (layers, ()), (attention, ()), (normalized, (torch.zeros(6), torch.ones(6)))],
    ids=["chain", "layers", "attention", "batch_norm"],
)
def test_random_schedules_compute_the_same_in_the_memory_that_the_solver_counts(function, more) -> None:
    program = joint(function, *more)
    lowering = lower(program, {})
    problem, dice = lowering.problem, random.Random(0)
    for _ in range(12):
        steps = list(range(problem.forward))
        for step in range(problem.forward, len(lowering.operations)):
            if step > problem.forward:
                steps += [s for s in range(problem.forward) if problem.recomputable[s] and dice.random() < 0.3]
            steps.append(step)
        schedule = Schedule(tuple(steps), problem.forward)
        trace = simulate(problem, schedule)
        check(problem, schedule, trace.peak_bytes)
        again = apply_schedule(program, lowering, schedule)
        assert_computes_the_same(program, again, X, W, *more)
        known = {node.name: node.target for node in program.graph.nodes}
        own = [node for node in again.graph.nodes if "_again" not in node.name]
        assert all(known[node.name] is node.target or node.op != "call_function" for node in own)
        # Copies that nobody reads are dropped, so the program may take less, never more.
        assert timeline(again).peak_bytes <= trace.peak_bytes
        assert again.inputs == program.inputs


def test_a_just_in_time_copy_lowers_the_peak_as_the_solver_says() -> None:
    def deep(x, w):
        for _ in range(4):
            x = (x @ w).sin()
        return (x,)

    program = joint(deep)
    lowering = lower(program, {})
    problem = lowering.problem
    cos = [node.name for node in lowering.operations if node.name.startswith("cos")]
    assert len(cos) == 4
    schedule = with_again(lowering, "mm", "sin", "mm_1", before=cos[-2])
    again = apply_schedule(program, lowering, schedule)
    live = dict(zip(timeline(again).steps, timeline(again).live_bytes, strict=True))
    seen: set[str] = set()
    for step, expected in zip(schedule.steps, simulate(problem, schedule).live_bytes, strict=True):
        name = lowering.operations[step].name
        if lowering.operations[step].op == "call_function":
            assert live[f"{name}_again" if name in seen else name] == expected
        seen.add(name)
    assert timeline(again).peak_bytes < timeline(program).peak_bytes
