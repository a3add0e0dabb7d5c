"""The ways to plan a step: each is rewritten and searched once, and planned within a limit."""

import dataclasses

import pytest
import torch

import memopt
from memopt.memory.cost.table import CostTable
from memopt.passes.chunk_loss import ChunkLoss
from memopt.passes.compress_masks import CompressMasks
from memopt.step.graphs import StepGraphs
from memopt.step.options import Options
from memopt.step.planned import predicted_peak
from memopt.step.stages import stages_of
from tests.passes.build import classified

W = torch.linspace(-0.3, 0.3, 32 * 32).reshape(32, 32)


@pytest.fixture
def graphs(monkeypatch):
    monkeypatch.setenv("MEMOPT_CACHE", "0")
    return StepGraphs([classified()], stages_of(memopt.TRAINING), verify=False, table=CostTable(limit_bytes=0))


def _options(graphs, attempt=lambda item: item):
    return Options(graphs, attempt, 20.0)


def test_what_changes_nothing_is_left_out_and_nothing_is_rewritten_twice(graphs, monkeypatch):
    made, plain = [], graphs.rewritten
    monkeypatch.setattr(graphs, "rewritten", lambda item, passes: (made.append(passes), plain(item, passes))[1])
    options = _options(graphs)
    both = options.of((ChunkLoss(), CompressMasks()))  # there is no mask
    assert [item.name for item in both.passes] == ["chunk_loss"]
    assert options.of((ChunkLoss(),)) is both and options.of((ChunkLoss(), CompressMasks())) is both
    assert len(made) == 1
    assert options.of(()).items is graphs.captured and options.of(()).passes == ()


def test_a_rewrite_is_priced_and_several_about_as_each_by_itself(graphs):
    options = _options(graphs)
    plain, chunks = options.base_seconds(()), options.base_seconds((ChunkLoss(),))
    assert plain == sum(cost.seconds for cost in graphs.captured[0].costs.values())
    other = ChunkLoss().others[0]
    together = options.base_seconds((ChunkLoss(), other))
    assert together == pytest.approx(chunks + options.base_seconds((other,)) - plain)


def test_an_option_is_searched_once_until_it_is_to_be_at_length(graphs):
    options = _options(graphs)
    option = options.of(())
    first = options.planner(option)
    assert options.planner(option) is first
    options.brief = True
    options.search_at_length()
    assert option.planner is None and not options.brief
    assert options.planner(option) is not first


@pytest.mark.parametrize("more", [0, 20_000])
def test_what_a_trial_takes_is_planned_for(graphs, more):
    def attempt(item):
        return dataclasses.replace(item, measured=item.timeline.peak_bytes + more)

    options = _options(graphs, attempt)
    room = int(0.8 * predicted_peak(graphs.captured))
    planned, step = options.plan_within(options.of((ChunkLoss(),)), room)
    assert step.feasible and step.peak_bytes + more <= room
    assert planned[0].measured == step.peak_bytes + more and not options.starved


def test_where_memory_runs_out_less_is_planned_for_and_it_is_remembered(graphs):
    tried = []

    def attempt(item):
        tried.append(item.timeline.peak_bytes)
        return dataclasses.replace(item, ran_out=len(tried) == 1)

    options = _options(graphs, attempt)
    _, step = options.plan_within(options.of(()), predicted_peak(graphs.captured))
    assert options.starved and len(tried) == 2 and step.feasible
    assert tried[1] <= tried[0] - tried[0] // 8
