"""Checkpoint: limits kept or refused, what is recomputed and what is kept, and the same bits."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from memopt.memory.cost.table import CostTable
from memopt.memory.timeline import timeline
from memopt.pass_manager import PassError, PassManager
from memopt.passes import checkpoint
from memopt.passes.checkpoint import Checkpoint, workspace
from memopt.passes.eliminate_copies import EliminateCopies
from memopt.passes.eliminate_dead import EliminateDead
from memopt.program import Phase, Program
from memopt.solve.schedule import Schedule
from memopt.step.encode_step import lower
from tests.passes.build import capture_joint, check, trace

X = torch.linspace(-1, 1, 16 * 32).reshape(16, 32)
W = torch.linspace(-0.3, 0.3, 32 * 32).reshape(32, 32)


@dataclasses.dataclass(frozen=True)
class Cost:
    seconds: float
    workspace_bytes: int = 0


def joint(function, *more: torch.Tensor) -> Program:
    program = capture_joint(function, X, W.clone().requires_grad_(), *more)
    return EliminateDead().run(EliminateCopies().run(program).program).program


def deep(x, w):
    for _ in range(6):
        x = F.gelu(x @ w).sin() + x
    return (x,)


def saved(program: Program) -> set[str]:
    """The forward calls that backward reads."""
    return {
        node.name
        for node in program.calls
        if node.meta["phase"] is Phase.FORWARD and any(u.meta.get("phase") is Phase.BACKWARD for u in node.users)
    }


@pytest.mark.parametrize("share", [0.9, 0.75, 0.6])
def test_a_limit_is_kept_and_the_numbers_too(share) -> None:
    program = joint(deep)
    limit = int(share * timeline(program).peak_bytes)
    result = check(Checkpoint(limit, seconds=20), program, X, W)
    assert timeline(result.program).peak_bytes <= limit
    assert result.changes and all(change.summary.endswith("in backward") for change in result.changes)
    for change in result.changes:
        (original,), (copy,) = change.before, change.after
        node = next(node for node in result.program.calls if node.name == copy)
        assert node.meta["recomputes"] == original and node.meta["phase"] is Phase.BACKWARD


def test_the_cheap_is_recomputed_and_the_dear_is_kept() -> None:
    program = joint(deep)
    costs = {node.name: Cost(1.0 if "mm" in str(node.target) else 1e-4) for node in program.calls}
    limit = int(0.7 * timeline(program).peak_bytes)
    result = check(Checkpoint(limit, costs=costs, seconds=20), program, X, W)
    again = [node for node in result.program.calls if "recomputes" in node.meta]
    assert again and not any("mm" in str(node.target) for node in again)


def test_without_a_limit_only_what_costs_no_time_is_recomputed() -> None:
    program = joint(deep)
    dear = {node.name: Cost(1.0) for node in program.calls}
    assert not [n for n in Checkpoint(costs=dear).run(program).program.calls if "recomputes" in n.meta]
    free = {name: Cost(1.0 if "mm" in name else 0.0) for name in dear}
    result = check(Checkpoint(costs=free), program, X, W)
    assert timeline(result.program).peak_bytes < timeline(program).peak_bytes


def test_a_limit_that_no_plan_keeps_is_refused_with_the_least() -> None:
    program = joint(deep)
    with pytest.raises(ValueError, match="no plan stays below 1000 bytes; the least peak is") as caught:
        Checkpoint(1000, seconds=20).run(program)
    least = int(str(caught.value).split()[-1])
    assert timeline(Checkpoint(least, seconds=20).run(program).program).peak_bytes <= least
    with pytest.raises(PassError, match="pass checkpoint: ValueError: no plan stays below"):
        PassManager([Checkpoint(1000, seconds=20)]).run(program)


def test_workspace_counts_against_the_limit() -> None:
    program = joint(deep)
    peak = timeline(program).peak_bytes
    costs = {node.name: Cost(1.0, 10 * peak if node.name == "gelu_3" else 0) for node in program.calls}
    with pytest.raises(ValueError, match="no plan stays below"):
        Checkpoint(peak, costs=costs, seconds=20).run(program)


def test_recomputed_nodes_take_the_workspace_of_their_originals() -> None:
    program = joint(deep)
    table = CostTable().measure_all(program)
    costs = {name: dataclasses.replace(cost, workspace_bytes=77) for name, cost in table.items()}
    limit = int(0.6 * timeline(program).peak_bytes)
    planned = Checkpoint(limit, seconds=20).run(program).program
    found = workspace(planned, costs)
    again = [node.name for node in planned.calls if node.meta.get("recomputes") in costs]
    assert again and all(found[name] == 77 for name in again)
    assert workspace(planned, {}) == {}


def test_an_inference_program_is_returned_as_it_is() -> None:
    program = trace(lambda x: (x.sin().exp(),), X)
    result = Checkpoint(1).run(program)
    assert result.program is program and not result.changes and not result.refusals


def test_a_schedule_that_was_found_before_is_not_searched_again(monkeypatch) -> None:
    program = joint(deep)
    lowering = lower(program, {})
    names = [node.name for node in lowering.operations]
    steps = list(range(len(names)))
    cos = next(name for name in names if name.startswith("cos"))
    steps.insert(names.index(cos), names.index("gelu_5"))
    monkeypatch.setattr(checkpoint, "plan_step", None)
    result = check(Checkpoint(schedule=Schedule(tuple(steps), lowering.problem.forward)), program, X, W)
    assert [(change.before, change.after) for change in result.changes] == [(("gelu_5",), ("gelu_5_again",))]
    assert "gelu_5" not in saved(result.program) and "gelu_5" in saved(program)


def test_a_plan_that_changes_nothing_returns_the_program() -> None:
    program = joint(lambda x, w: ((x @ w).sin(),))
    lowering = lower(program, {})
    plain = Schedule(tuple(range(len(lowering.operations))), lowering.problem.forward)
    result = Checkpoint(schedule=plain).run(program)
    assert result.program is program and result.changes == ()


def test_views_are_rebuilt_and_that_is_on_record() -> None:
    program = joint(lambda x, w: ((x @ w).view(32, 16)[:5].sin(),))
    lowering = lower(program, {})
    plain = Schedule(tuple(range(len(lowering.operations))), lowering.problem.forward)
    result = check(Checkpoint(schedule=plain), program, X, W)
    assert [change.summary for change in result.changes] == ["rebuild views in backward instead of keeping them"]
    assert saved(result.program) == {"mm"} != saved(program)


def test_refused_random_operations_are_kept() -> None:
    def noisy(x, w):
        for _ in range(5):
            x = F.dropout((x @ w).tanh(), 0.5).sin()
        return (x,)

    program = joint(noisy)
    result = check(Checkpoint(int(0.8 * timeline(program).peak_bytes), seconds=20), program, X, W)
    random = {refusal.node for refusal in result.refusals}
    assert len(random) == 5
    assert all(refusal.reason.startswith("draws random numbers: its result is kept (") for refusal in result.refusals)
    assert not random & {node.meta.get("recomputes") for node in result.program.calls}


def test_running_statistics_of_batch_norm_move_once() -> None:
    def normalized(x, w, mean, var):
        for _ in range(4):
            x = F.batch_norm(x @ w, mean, var, training=True, momentum=0.2).relu().sin()
        return (x,)

    statistics = torch.zeros(32), torch.ones(32)
    program = joint(normalized, *statistics)
    costs = {node.name: Cost(1.0 if "mm" in str(node.target) else 1e-6) for node in program.calls}
    limit = int(0.75 * timeline(program).peak_bytes)
    result = check(Checkpoint(limit, costs=costs, seconds=20), program, X, W, *statistics)
    again = [str(n.target) for n in result.program.calls if "batch_norm" in n.meta.get("recomputes", "")]
    assert "aten._native_batch_norm_legit.no_stats" in again
