"""The graphs of a step through the passes: what is rewritten before a plan, by a plan, and what is on record of it."""

import dataclasses

import pytest
import torch

import memopt
from memopt.memory.cost.table import CostTable
from memopt.memory.timeline import timeline
from memopt.pass_manager import PassManager
from memopt.passes.chunk_loss import ChunkLoss
from memopt.solve.schedule import Schedule, ScheduleError
from memopt.step.graphs import StepGraphs
from memopt.step.search import StepSearch
from memopt.step.stages import stages_of
from tests.passes.build import capture_joint


@pytest.fixture(autouse=True)
def _nothing_on_disk(monkeypatch):
    monkeypatch.setenv("MEMOPT_CACHE", "0")


def program(rows=512):
    """A loss of rows, which `ChunkLoss` divides, after a layer."""

    def function(x, w, labels):
        return (torch.nn.functional.cross_entropy(torch.tanh(x @ w) @ w, labels),)

    w = torch.linspace(-0.3, 0.3, 64 * 64).reshape(64, 64).requires_grad_()
    return capture_joint(function, torch.linspace(-1, 1, rows * 64).reshape(rows, 64), w, torch.arange(rows) % 64)


def graphs(*programs):
    return StepGraphs(programs, stages_of(memopt.TRAINING), verify=False, table=CostTable(limit_bytes=0))


def test_before_a_plan_only_the_early_passes_run_in_order():
    given = [program(), program(64)]
    found = graphs(*given).captured
    assert [item.source for item in found] == given
    for item in found:
        assert [record.name for record in item.records] == [p.name for p in stages_of(memopt.TRAINING).early]
        assert item.before is item.program and item.choice is None
        assert item.timeline.peak_bytes == timeline(item.program).peak_bytes


def test_a_further_rewrite_is_recorded_alone_and_leaves_the_captured_graph_as_it_is():
    all_graphs = graphs(program())
    (captured,) = all_graphs.captured
    before = str(captured.program.graph)
    lowered = all_graphs.rewritten(captured, [ChunkLoss()])
    assert [record.name for record in lowered.records] == ["chunk_loss"] and lowered.records[0].changes
    assert lowered.before is lowered.program is not captured.program and lowered.source is captured.source
    assert str(captured.program.graph) == before and all_graphs.captured == [captured]


def test_the_record_names_all_passes_and_says_which_were_not_used():
    all_graphs = graphs(program())
    lowered = [all_graphs.rewritten(all_graphs.captured[0], [ChunkLoss()])]
    (without,) = all_graphs.recorded(all_graphs.captured, lowered, ())
    names = [record.name for record in without.records]
    assert names == [p.name for p in stages_of(memopt.TRAINING).early] + ["chunk_loss"]
    assert not without.records[-1].changes and "not used" in without.records[-1].refusals[-1].reason
    (used,) = all_graphs.recorded(lowered, lowered, [ChunkLoss()])
    assert [record.name for record in used.records] == names and used.records[-1].changes
    (alone,) = all_graphs.recorded(all_graphs.captured, all_graphs.captured, ())
    assert [record.name for record in alone.records] == names[:-1], "others were not looked at"


def test_graphs_are_put_on_record_when_they_are_proved_and_not_before(monkeypatch):
    all_graphs = graphs(program())
    assert all(record.after is None for record in all_graphs.captured[0].records)
    (proved,) = all_graphs.recorded(all_graphs.captured, all_graphs.captured, ())
    assert all(record.before is not None and record.after is not None for record in proved.records)
    monkeypatch.setattr(PassManager, "run", lambda *_: pytest.fail("done before"))
    assert all_graphs.recorded(all_graphs.captured, all_graphs.captured, ()) == [proved]


def test_a_plan_that_was_found_before_gives_the_same_graph_and_the_same_records():
    search = StepSearch(graphs(program()), attempt=lambda item: item, seconds=0.5)
    (planned,) = search.plan(int(search.captured[0].timeline.peak_bytes * 0.8)).planned
    all_graphs = graphs(program())
    (captured,) = all_graphs.captured
    chosen = [item for item in stages_of(memopt.TRAINING).lowering if record_of(planned, item.name).changes]
    lowered = all_graphs.rewritten(captured, stages_of(memopt.TRAINING).lowering)
    item = all_graphs.rewritten(captured, chosen) if chosen else captured
    plan = planned.choice.plan
    (again,) = all_graphs.recorded([all_graphs.followed(item, plan.schedule, plan.peak_bytes)], [lowered], chosen)
    assert str(again.program.graph) == str(planned.program.graph)
    assert again.timeline.peak_bytes == planned.timeline.peak_bytes
    # Rewrites that were not chosen come first in both, then those that were.
    assert [record.name for record in again.records] == [record.name for record in planned.records]
    assert [record.name for record in again.records][-2:] == ["checkpoint", "inplace"]


def record_of(planned, name):
    return next(record for record in planned.records if record.name == name)


@pytest.mark.parametrize("steps", [(), (0,), (10**6,)])
def test_an_order_of_another_graph_is_refused(steps):
    all_graphs = graphs(program(64))
    (captured,) = all_graphs.captured
    with pytest.raises(ScheduleError) as caught:
        all_graphs.followed(captured, Schedule(steps, len(steps)), 0)
    assert "\n" not in str(caught.value)


def test_the_costs_are_those_of_what_the_engine_fuses():
    class Halved:
        def costs(self, program, costs):
            return {name: dataclasses.replace(cost, seconds=cost.seconds / 2) for name, cost in costs.items()}

        def arrange(self, program):
            return program

        def mark(self, program):
            return program

    plain = graphs(program(64))
    stages = dataclasses.replace(stages_of(memopt.TRAINING), fusion=Halved())
    fused = StepGraphs([program(64)], stages, verify=False, table=CostTable(limit_bytes=0))
    total, half = (sum(cost.seconds for cost in item.captured[0].costs.values()) for item in (plain, fused))
    assert half == pytest.approx(total / 2) and total > 0
