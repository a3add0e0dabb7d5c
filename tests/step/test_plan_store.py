"""Plans kept on disk: loaded without a search, and never trusted beyond what the checker accepts."""

from __future__ import annotations

import base64
import dataclasses
import json
import subprocess
import sys
import zlib

import pytest
import torch

import memopt
from memopt.memory.cost import disk
from memopt.solve import solver_worker
from memopt.solve.schedule import Schedule
from memopt.step import plan_store, planner
from memopt.step.curve import CurvePoint
from memopt.step.graphs import StepGraphs
from memopt.step.plan_store import PlanStore, StoredPlan
from memopt.step.planned import predicted_peak
from memopt.step.search import StepSearch, stored_plan
from memopt.step.stages import stages_of
from tests.step.test_search import CostTable, program
from tests.training.steps import assert_equal, gradients, make

PLAN = StoredPlan(("chunk_loss",), (Schedule((0, 1, 2, 0, 3), 2),), (70,), 80, 60, (CurvePoint(80, 1.5, 0.0, True),))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "plans"


@pytest.fixture
def searches(monkeypatch):
    made = []
    real = solver_worker.curve
    monkeypatch.setattr(
        solver_worker, "curve", lambda problem, *, seconds: made.append(1) or real(problem, seconds=min(seconds, 0.5))
    )
    return made


class Fusion:
    """An engine that fuses nothing, and whose code has the last word."""

    def costs(self, program, costs):
        return costs

    def arrange(self, program):
        return program

    mark = arrange


def search(layers=5, seconds=0.5, fusion=None, more=None):
    stages = dataclasses.replace(stages_of(memopt.TRAINING), fusion=fusion)
    table = CostTable(limit_bytes=0)
    graphs = StepGraphs([program(layers)], stages, verify=False, table=table)

    def attempt(item):
        return item if more is None else dataclasses.replace(item, measured=item.timeline.peak_bytes + more)

    return StepSearch(graphs, attempt=attempt, seconds=seconds)


def find_less(monkeypatch):
    """Have searches find no more than the fastest plan."""
    real = solver_worker.curve

    def poorer(problem, *, seconds):
        found = real(problem, seconds=seconds)
        return dataclasses.replace(found, points=found.points[:1])

    monkeypatch.setattr(solver_worker, "curve", poorer)
    monkeypatch.setattr(planner, "in_place_floor", lambda *_, **__: None)


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def rewrite(path, change):
    """Change a record's value and give it a digest that fits: a forger, not an accident."""
    entry = json.loads(path.read_text())
    del entry["digest"]
    change(entry["value"])
    path.write_text(json.dumps({**entry, "digest": disk._digest(entry)}))


def test_a_plan_comes_back_as_it_was():
    store = PlanStore()
    assert store.get("key") is None
    assert store.put("key", PLAN)
    assert PlanStore().get("key") == PLAN


def test_another_version_s_plans_are_absent(monkeypatch):
    PlanStore().put("key", PLAN)
    monkeypatch.setattr(memopt, "__version__", "9.9")
    assert PlanStore().get("key") is None
    monkeypatch.undo()


def test_damaged_and_cut_off_files_are_absent(folder):
    PlanStore().put("key", PLAN)
    (path,) = files(folder)
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        assert PlanStore().get("key") is None
    for place in range(0, len(whole), 5):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert PlanStore().get("key") in (None, PLAN)
    path.write_bytes(whole)
    assert PlanStore().get("key") == PLAN


def bomb():
    return base64.b64encode(zlib.compress(bytes(64), 9)[:-3]).decode()


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value.pop("curve"),
        lambda value: value.update(schedules=7),
        lambda value: value.update(lowering=[7]),
        lambda value: value.update(peaks=[-1]),
        lambda value: value.update(peaks=[]),
        lambda value: value.update(peak_bytes="80"),
        lambda value: value.update(curve=[[1, -2.0, 0.0, True]]),
        lambda value: value["schedules"][0].update(steps="no base64"),
        lambda value: value["schedules"][0].update(steps=base64.b64encode(b"not compressed").decode()),
        lambda value: value["schedules"][0].update(steps=base64.b64encode(zlib.compress(b"odd")).decode()),
        lambda value: value["schedules"][0].update(steps=bomb()),
        lambda value: value["schedules"][0].update(forward=True),
    ],
)
def test_forged_records_of_another_form_are_absent(folder, change):
    PlanStore().put("key", PLAN)
    (path,) = files(folder)
    rewrite(path, change)
    assert PlanStore().get("key") is None


def test_a_schedule_longer_than_any_is_absent(monkeypatch):
    PlanStore().put("key", PLAN)
    monkeypatch.setattr(plan_store, "_LONGEST", 4)
    assert PlanStore().get("key") is None


def test_an_equal_step_is_planned_without_a_search(searches):
    first = search()
    room = int(predicted_peak(first.captured) * 0.8)
    found = first.plan(room)
    made = len(searches)
    assert made
    again = search().plan(room)
    assert len(searches) == made
    assert str(again.planned[0].program.graph) == str(found.planned[0].program.graph)
    assert (again.plan.peak_bytes, again.plan.minimum_bytes) == (found.plan.peak_bytes, found.plan.minimum_bytes)
    assert again.plan.curve == found.plan.curve
    names = [[(r.name, len(r.changes)) for r in one.planned[0].records] for one in (again, found)]
    assert names[0] == names[1]


@pytest.mark.parametrize("what", ["limit", "graph", "time", "passes", "costs"])
def test_another_step_is_another_plan(searches, what, monkeypatch):
    first = search()
    room = int(predicted_peak(first.captured) * 0.8)
    first.plan(room)
    made = len(searches)
    other = search(layers=4 if what == "graph" else 5, seconds=0.4 if what == "time" else 0.5)
    if what == "passes":
        other.stages = dataclasses.replace(other.stages, late=())
    if what == "costs":
        (item,) = other.captured
        costs = {name: dataclasses.replace(cost, seconds=cost.seconds + 1) for name, cost in item.costs.items()}
        other.captured = [dataclasses.replace(item, costs=costs)]
    other.plan(room - 4096 if what == "limit" else room)
    assert len(searches) > made


def other_steps(plan, change, forward=None):
    (schedule,) = plan.schedules
    steps = tuple(change(list(schedule.steps)))
    return dataclasses.replace(plan, schedules=(Schedule(steps, schedule.forward if forward is None else forward),))


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: dataclasses.replace(plan, peaks=(plan.peaks[0] - 1,)),
        lambda plan: dataclasses.replace(plan, peak_bytes=plan.peak_bytes - 1),
        lambda plan: other_steps(plan, lambda steps: steps[:-1]),
        lambda plan: other_steps(plan, lambda steps: [*steps[:-2], steps[-1], steps[-2]], forward=3),
        lambda plan: other_steps(plan, lambda steps: [10**6]),
        lambda plan: dataclasses.replace(plan, schedules=plan.schedules * 2),
        lambda plan: dataclasses.replace(plan, lowering=("no_such_pass",)),
    ],
)
def test_a_forged_plan_is_judged_and_not_used(searches, change, monkeypatch):
    first = search()
    room = int(predicted_peak(first.captured) * 0.8)
    found = first.plan(room)
    made = len(searches)
    forged = change(stored_plan(found))
    assert search().from_store(forged, room) is None
    monkeypatch.setattr(PlanStore, "get", lambda self, key: forged)
    again = search().plan(room)
    assert len(searches) > made and again.plan.feasible and predicted_peak(again.planned) <= room


def test_a_plan_for_more_memory_is_not_used_for_less(searches):
    first = search()
    peak = predicted_peak(first.captured)
    stored = stored_plan(first.plan(int(peak * 0.9)))
    assert search().from_store(stored, int(peak * 0.9)) is not None
    assert search().from_store(stored, stored.peak_bytes - 1) is None


def test_a_plan_over_the_limit_when_measured_is_not_kept(searches):
    first = search(more=10**9)
    room = int(predicted_peak(first.captured) * 0.8)
    assert first.plan(room).plan.minimum_bytes > 10**9
    made = len(searches)
    assert search().plan(room).plan.feasible
    assert len(searches) > made


def test_the_least_that_a_refusal_names_is_kept_by_a_search_that_finds_less(searches, monkeypatch):
    refused = search().plan(0).plan
    assert not refused.feasible
    find_less(monkeypatch)
    again = search().plan(refused.minimum_bytes)
    assert again.plan.feasible and predicted_peak(again.planned) == again.plan.peak_bytes == refused.minimum_bytes
    less = search().plan(refused.minimum_bytes - 1)  # nor is it taken for what it does not keep
    assert not less.plan.feasible and less.plan.minimum_bytes == refused.minimum_bytes
    assert predicted_peak(less.planned) == less.plan.peak_bytes == refused.minimum_bytes  # but it is the deepest plan


@pytest.mark.parametrize("fusion", [None, Fusion()])
def test_where_code_has_the_last_word_the_plan_that_was_named_by_it_stays(searches, monkeypatch, fusion):
    with monkeypatch.context() as patch:
        find_less(patch)
        named = search(fusion=fusion).plan(0).plan
    again = search(fusion=fusion).plan(0).plan
    assert not named.feasible and not again.feasible
    assert (again.peak_bytes < named.peak_bytes) == (fusion is None)  # else that is no more than a figure
    assert fusion is None or again.peak_bytes == named.peak_bytes


def test_the_deepest_plan_that_is_known_takes_what_its_run_took_where_that_is_more(searches, monkeypatch):
    refused = search().plan(0).plan
    find_less(monkeypatch)
    first = search(more=1000)
    again = first.plan(refused.minimum_bytes).plan
    assert not again.feasible and again.minimum_bytes == refused.minimum_bytes + 1000


def test_the_model_trains_the_same_on_a_plan_from_disk(searches):
    model, x = make(dropout=0.2)
    torch._dynamo.reset()
    found = []
    for _ in range(2):
        torch._dynamo.reset()
        model.zero_grad()
        run = memopt.compile(model, 0.7, backend="aten")
        torch.manual_seed(1)
        loss = run(x)
        loss.backward()
        found.append((loss.detach(), gradients(model), run.report.peak_bytes, len(searches)))
    assert found[0][3] == found[1][3] > 0
    assert_equal(found[0][:2], found[1][:2])
    assert found[0][2] == found[1][2]


SCRIPT = """
import json, sys, torch
import memopt
from memopt.solve import solver_worker
from memopt.step import solver_pool
solver_pool._FEW = 10**6  # here, where it is counted
made, real = [], solver_worker.curve
solver_worker.curve = lambda problem, *, seconds: made.append(1) or real(problem, seconds=min(seconds, 0.5))
torch.manual_seed(0)
model = memopt.models.build("gpt2", tiny=True)
report = memopt.plan(model, model.example_inputs(2, labels=True))
print(json.dumps([len(made), report.peak_bytes]))
"""


@pytest.mark.long
def test_another_process_finds_the_plan_again():
    rows = []
    for _ in range(2):
        out = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=True)
        rows.append(json.loads(out.stdout.splitlines()[-1]))
    assert rows[0][0] > 0 and rows[1][0] == 0
    assert rows[0][1] == rows[1][1]
