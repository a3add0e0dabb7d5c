"""The search of a step: passes by stages, plans for one limit after another, and what a measured step changes."""

import dataclasses

import pytest
import torch

import memopt
from memopt.memory.cost.table import CostTable
from memopt.passes.chunk_loss import ChunkLoss
from memopt.passes.eliminate_dead import EliminateDead
from memopt.step.graphs import StepGraphs
from memopt.step.options import Options
from memopt.step.planned import measured_peak, predicted_peak
from memopt.step.search import StepSearch, stored_plan
from memopt.step.stages import replay, stages_of
from tests.passes.build import classified, residual

W = torch.linspace(-0.3, 0.3, 32 * 32).reshape(32, 32)


@pytest.fixture(autouse=True)
def _nothing_on_disk(monkeypatch):
    monkeypatch.setenv("MEMOPT_CACHE", "0")


def program(layers=5):
    return residual(layers)


def make(attempt=lambda item: item, programs=None):
    given, stages = programs or [program()], stages_of(memopt.TRAINING)
    graphs = StepGraphs(given, stages, verify=False, table=CostTable(limit_bytes=0))
    return StepSearch(graphs, attempt=attempt, seconds=20.0)  # a count ends it, not the time


def test_passes_by_stages_keep_their_order():
    stages = stages_of(memopt.TRAINING)
    names = [item.name for item in (*stages.early, *stages.lowering)]
    before = [item.name for item in memopt.TRAINING[: [p.name for p in memopt.TRAINING].index("checkpoint")]]
    assert sorted(names) == sorted(before) and all(item.lowers_floor for item in stages.lowering)
    assert [item.name for item in stages.late] == ["inplace"] and stages.searched


def test_without_checkpoint_all_are_early_and_nothing_is_searched():
    stages = stages_of((EliminateDead(), ChunkLoss()))
    assert [item.name for item in stages.early] == ["eliminate_dead", "chunk_loss"] and not stages.searched


def test_one_search_serves_any_number_of_limits(monkeypatch):
    searches = []
    from memopt.solve import solver_worker

    real = solver_worker.curve
    monkeypatch.setattr(solver_worker, "curve", lambda *args, **options: searches.append(1) or real(*args, **options))
    search = make()
    plain = predicted_peak(search.captured)
    found = [search.plan(int(plain * share)) for share in (0.9, 0.7)]
    assert len(searches) == 1
    for share, one in zip((0.9, 0.7), found, strict=True):
        assert one.plan.feasible and one.plan.peak_bytes == predicted_peak(one.planned) <= plain * share
        assert [record.name for record in one.planned[0].records][-2:] == ["checkpoint", "inplace"]
    assert not search.plan(1).plan.feasible


def test_a_plan_is_proved_when_that_is_asked_for():
    search = make()
    room = int(predicted_peak(search.captured) * 0.7)
    found = search.plan(room, prove=False)
    assert not found.proved and "checkpoint" not in [record.name for record in found.planned[0].records]
    proved = search.prove(found)
    assert proved.proved and [record.name for record in proved.planned[0].records][-2:] == ["checkpoint", "inplace"]
    assert proved.planned[0].program is found.planned[0].program, "what was counted is what was proved"
    assert search.prove(proved) is proved


def test_of_rewrites_those_that_take_longer_than_a_plan_within_the_room_are_left_out(monkeypatch):
    search = make(programs=[classified()])

    def found(room=None):
        return [item.key for (item,) in search.lowerings(room)]

    every = found()
    assert sorted(every) == ["chunk_loss", "chunk_loss*2"]
    chosen = search.stages.called(every[:1])
    plain = predicted_peak(search.captured)
    assert found(1) == every  # no plan keeps that
    assert search._options.planner(search._options.of(())).outlook(plain).seconds < search._options.base_seconds(chosen)
    assert found(plain) == []
    monkeypatch.setattr(Options, "base_seconds", lambda self, chosen: 1e-12 if chosen else 0.0)
    assert sorted(found(plain)) == sorted(every)
    monkeypatch.setattr(Options, "base_seconds", lambda self, chosen: 0.0)
    assert found(plain) == ["chunk_loss"], "what costs nothing is not looked at set otherwise"


def test_rewrites_go_by_their_keys():
    stages = stages_of(memopt.TRAINING)
    for keys in ((), ("chunk_loss",), ("chunk_loss*2",), ("compress_masks", "chunk_loss*2")):
        assert tuple(item.key for item in stages.called(keys)) == keys
    assert stages.called(("chunk_loss*3",)) is None
    assert stages.called(("chunk_loss", "compress_masks")) is None, "not their order"


@pytest.mark.quick("0.75")
@pytest.mark.parametrize("share", [0.6, 0.75])
def test_chunks_are_as_large_as_the_limit_allows(monkeypatch, share):
    """Fewer chunks take less time; where their memory is not there, or is worth more, there are more of them."""
    search = make(programs=[classified(512)])
    monkeypatch.setattr("memopt.step.search.acceptable", lambda plan: False)
    room = int(share * predicted_peak(search.captured))
    found = search.plan(room)
    assert found.plan.feasible
    (chosen,) = found.lowering
    others = [
        search._options.planner(search._options.of((item,))).outlook(room)
        for item in (ChunkLoss(), *ChunkLoss().others)
    ]
    least = min(plan.seconds for plan in others if plan.feasible)
    assert found.plan.seconds == pytest.approx(least)
    stored = stored_plan(found)
    assert stored.lowering == (chosen.key,)
    again = search.from_store(stored, room)
    assert again is not None and [item.key for item in again.lowering] == [chosen.key]
    records = [record for record in again.planned[0].records if record.name == "chunk_loss"]
    assert len(records) == 1 and records[0].changes


def test_a_step_that_takes_more_than_predicted_is_planned_for_less():
    more = 3000

    def attempt(item):
        return dataclasses.replace(item, measured=item.timeline.peak_bytes + more)

    plain = predicted_peak(make().captured)
    room = int(plain * 0.8)
    found = make(attempt).plan(room)
    assert found.plan.feasible and found.plan.peak_bytes <= room - more
    assert measured_peak(found.planned, 0) <= room


def test_the_deepest_plan_is_tried_before_a_limit_is_refused():
    """A step that takes more than predicted when little is recomputed, and as predicted when much is."""
    deepest = make().plan(1).plan.minimum_bytes

    def attempt(item):
        slack = item.timeline.peak_bytes - deepest
        return dataclasses.replace(item, measured=deepest + 3 * slack)

    room = int(deepest * 1.1)
    found = make(attempt).plan(room)
    assert found.plan.feasible and measured_peak(found.planned, 0) <= room


@pytest.mark.quick("0.3")
@pytest.mark.parametrize("share", [0.1, 0.3])
def test_a_refusal_names_what_a_measured_step_keeps(share):
    def attempt(item):
        return dataclasses.replace(item, measured=int(item.timeline.peak_bytes * (1 + share)))

    least = make(attempt).plan(1).plan
    predicted = make().plan(1).plan.minimum_bytes
    assert not least.feasible and least.minimum_bytes == int(predicted * (1 + share))
    for room in (predicted, int(least.minimum_bytes * 0.98), least.minimum_bytes, int(least.minimum_bytes * 1.02)):
        found = make(attempt).plan(room)
        assert found.plan.feasible == (room >= least.minimum_bytes)
        assert found.plan.minimum_bytes <= room or not found.plan.feasible


@pytest.mark.parametrize("share", [1.0, 0.7])
def test_a_plan_is_applied_again_to_an_equal_program(share):
    search = make()
    found = search.plan(int(predicted_peak(search.captured) * share))
    again = replay(program(), search.stages, found.lowering, found.planned[0].choice.plan.schedule)
    assert str(again.graph) == str(found.planned[0].program.graph)


def test_without_a_schedule_nothing_is_recomputed():
    again = replay(program(), stages_of(memopt.TRAINING), (), None)
    assert not any("recomputes" in node.meta for node in again.calls)
