"""Saved values that wait on the host: which ones, the code that comes of it, and that no number changes."""

import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._inductor.graph import GraphLowering

import memopt
from memopt.budget import format_bytes
from memopt.host.operators import ARRIVED, FETCH, LANDED, TO_HOST
from memopt.inductor import offload as engine
from memopt.inductor import partition
from memopt.inductor.offload import candidates, problem_of, sent, waiting
from memopt.inductor.peak_estimate import expected_bytes
from memopt.memory.cost.table import CostTable
from memopt.passes.offload import Offload
from memopt.solve.offload import trips
from tests.solve.check_offload import check

WITHOUT = memopt.TRAINING
WITH = (*WITHOUT, Offload(least_bytes=1024, share=0.5))


class Net(nn.Module):
    """Blocks with dropout, that keep much."""

    def __init__(self, layers=6, width=32):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.Linear(4 * width, width)) for _ in range(layers)
        )

    def blocks(self, x):
        for up, down in self.layers:
            x = x + down(F.dropout(F.gelu(up(x)), 0.1, self.training))
        return x

    def forward(self, x):
        return self.blocks(x).square().mean()


def linked(patch, folder):
    """A host that is far away from this CPU, by a link that is fast enough; what is settled is in this folder alone."""
    patch.setenv("MEMOPT_CACHE_DIR", str(folder))
    patch.setattr(CostTable, "link", lambda self, device: (1e12, 1e12))
    patch.setattr(engine, "may_wait", lambda costs: False)


@pytest.fixture
def _linked(monkeypatch, tmp_path):
    linked(monkeypatch, tmp_path)


@pytest.fixture
def codes(monkeypatch):
    """The code of all graphs, as it is written."""
    written = []
    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(written.append))
    return written


def results(run, model, x, steps=2, **options):
    """Losses and gradients of a few steps under one seed."""
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = run(x)
        loss.backward(**options)
        found += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
        model.zero_grad()
    return found


def compiled(model, budget=0.5, passes=WITH):
    torch._dynamo.reset()
    return memopt.compile(model, budget, backend="inductor", passes=passes)


def assert_same(found, expected):
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.long
@pytest.mark.usefixtures("_compiler", "_linked")
def test_a_step_recomputes_less_and_computes_the_same(codes):
    model, x = Net(), torch.randn(256, 32)
    plain = compiled(model, passes=WITHOUT)
    expected = results(plain, model, x)
    codes.clear()
    run = compiled(model)
    assert_same(results(run, model, x), expected)
    report = run.report
    (note,) = [note for note in report.notes if "wait" in note]
    assert re.match(r"\d+ values wait, .* in the host's pinned memory between forward and backward", note)
    assert report.peak_bytes <= report.budget_bytes
    extra = [next(p.extra for p in item.curve if p.chosen) for item in (report, plain.report)]
    assert extra[0] < extra[1]
    forward, backward = codes[-2:]
    assert forward.count("to_host.default(") == forward.count("landed_into.default(") == int(note.split()[0])
    assert backward.count("fetch.default(") == backward.count("arrived_into.default(") == int(note.split()[0])
    assert "not aligned" not in backward and "clone" not in forward + backward


@pytest.mark.usefixtures("_compiler", "_linked")
def test_nothing_reads_a_value_before_it_is_back_or_lets_go_of_it_before_it_has_landed(codes):
    model, x = Net(), torch.randn(256, 32)
    results(compiled(model), model, x)
    forward, backward = (code.splitlines() for code in codes[-2:])
    for line, text in enumerate(forward):
        for value, held in re.findall(r"landed_into\.default\((\w+), (\w+)\)", text):
            (begun,) = [at for at, other in enumerate(forward) if f"to_host.default({value})" in other]
            gone = [at for at, other in enumerate(forward) if re.search(rf"\bdel {value}\b", other)]
            assert begun < line < min(gone)
            assert not any(re.search(rf"\bdel {held}\b", other) for other in forward)
    for line, text in enumerate(backward):
        for value, _ in re.findall(r"arrived_into\.default\((\w+), (\w+)\)", text):
            mentions = [at for at, other in enumerate(backward) if re.search(rf"\b{value}\b", other)]
            calls = [at for at in mentions if "assert_" not in backward[at]]
            assert calls[:2] == [calls[0], line], "made by the copy, and read by nothing before"
            assert calls[0] < line < calls[2]


@pytest.mark.long
@pytest.mark.usefixtures("_compiler", "_linked")
def test_backward_may_run_twice_or_never_and_without_gradients_nothing_changes():
    model, x = Net(), torch.randn(256, 32)
    budget = memopt.plan(model, x).unconstrained_bytes // 2
    plain = compiled(model, budget, WITHOUT)
    expected = results(plain, model, x, 1)
    with torch.no_grad():
        quiet = plain.eval()(x)
    plain.train()
    run = compiled(model, budget)
    torch.manual_seed(0)
    # Inductor's cache does not tell code that writes over what is saved from other code.
    with torch._functorch.config.patch(donated_buffer=False), torch._inductor.config.patch(fx_graph_cache=False):
        loss = run(x)
        loss.backward(retain_graph=True)
        assert_same([loss.detach(), *(p.grad for p in model.parameters())], expected)
        with torch.no_grad():
            assert torch.equal(run.eval()(x), quiet)
        run.train()
        model.zero_grad()
        loss.backward()
        assert_same([loss.detach(), *(p.grad for p in model.parameters())], expected)
        del loss  # a kept graph counts in the next call
        run(x)  # and no backward
    model.zero_grad()
    run = compiled(model, 3 * budget)  # what two calls of one step hold
    torch.manual_seed(0)
    second = run(x)
    torch.manual_seed(0)
    first = run(x)
    for loss in (first, second):  # one waits on the host while another comes and goes
        loss.backward()
        assert_same([loss.detach(), *(p.grad for p in model.parameters())], expected)
        model.zero_grad()


@pytest.mark.quick("None-passes1")
@pytest.mark.usefixtures("_compiler", "_linked")
@pytest.mark.parametrize(
    ("budget", "passes"), [(0.5, WITHOUT), (None, WITH), (1.0, WITH), (0.5, (*WITHOUT, Offload(share=0.0)))]
)
def test_nothing_waits_unless_it_may_and_is_of_use(budget, passes, monkeypatch):
    model, x = Net(), torch.randn(256, 32)
    run = compiled(model, budget, passes)
    results(run, model, x, 1)
    assert not any("wait" in note for note in run.report.notes)


@pytest.mark.usefixtures("_compiler")
def test_a_cpu_has_no_other_memory():
    model, x = Net(), torch.randn(256, 32)
    run = compiled(model)
    results(run, model, x, 1)
    assert not any("wait" in note for note in run.report.notes)


@pytest.mark.long
@pytest.mark.usefixtures("_compiler", "_linked")
def test_what_settled_the_step_is_followed_in_another_process(monkeypatch):
    model, x = Net(), torch.randn(256, 32)
    first = compiled(model)
    expected = results(first, model, x)
    again = compiled(model)
    assert_same(results(again, model, x), expected)
    assert again.report.notes == first.report.notes and again.report.peak_bytes == first.report.peak_bytes


# -- the graphs -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def graphs(_compiler, tmp_path_factory):
    """The graphs of a step before anything waits, their outputs, and what its operations take; tests leave them so."""
    found = []

    def seen(session, forward, backward, outputs):
        found.append((forward, backward, outputs, engine._seconds(session)))
        return forward, backward

    with pytest.MonkeyPatch.context() as patch:
        linked(patch, tmp_path_factory.mktemp("graphs"))
        patch.setattr(partition, "wait_on_host", seen)
        torch.manual_seed(0)
        model, x = Net(), torch.randn(256, 32)
        results(compiled(model), model, x, 1)
    return found[-1]


def test_the_graphs_say_what_goes_where(graphs):
    forward, backward, outputs, seconds = graphs
    found = candidates(forward, backward, outputs, 2**14)
    assert found and all(node.meta["val"].nbytes >= 2**14 for node in found)
    problem = problem_of(forward, backward, found, seconds, (1e12, 1e12), 2**30)
    ways = trips(problem)
    check(problem, ways)
    first, second = sent(forward, backward, outputs, found, problem, ways)
    first.graph.lint()
    second.graph.lint()
    assert waiting(first) == [problem.values[way.value].size for way in ways] and waiting(forward) == []
    assert expected_bytes(forward, backward, outputs) - expected_bytes(first, second, outputs) > sum(waiting(first)) / 2
    saved = [node for node in first.graph.output_node().args[0][outputs:] if isinstance(node, fx.Node)]
    landed = [node for node in saved if node.target is LANDED]
    assert len(landed) == len(ways) and len(saved) == len(forward.graph.output_node().args[0]) - outputs
    inputs = {node.name: node for node in second.graph.find_nodes(op="placeholder")}
    assert len(inputs) == len(backward.graph.find_nodes(op="placeholder"))
    for node in landed:
        value, copy = node.args
        assert copy.target is TO_HOST and copy.args == (value,) and value.name in {item.name for item in found}
        held = inputs[node.name]
        (fetched,) = [user for user in held.users if user.target is FETCH]
        (back,) = fetched.users
        assert back.target is ARRIVED and back.args == (fetched, held) and set(held.users) == {fetched, back}
        before = next(item for item in backward.graph.nodes if item.name == value.name)
        assert {user.name for user in back.users} == {user.name for user in before.users}


def test_as_many_wait_as_are_of_use(graphs, monkeypatch):
    monkeypatch.setattr(engine, "may_wait", lambda costs: False)
    forward, backward, outputs, seconds = graphs
    whole = expected_bytes(forward, backward, outputs)

    def sizes(limit, *, recomputes, **changes):
        costs = {name: SimpleNamespace(seconds=taken) for name, taken in seconds.items()}
        session = SimpleNamespace(
            rewriting=SimpleNamespace(passes=WITH), limit_bytes=limit, one_graph=True, recomputes=recomputes,
            step=SimpleNamespace(planned=(SimpleNamespace(costs=costs),)),
            excess_with=lambda held: max(0, held - limit), resident=SimpleNamespace(device=torch.device("cpu")),
            table=SimpleNamespace(link=lambda device: (1e12, 1e12)),
        )  # fmt: skip
        session.__dict__.update(changes)
        first, second = engine.wait_on_host(session, forward, backward, outputs)
        assert (first is forward) == (second is backward) == (not waiting(first))
        return waiting(first)

    every = sizes(whole, recomputes=True)
    few = sizes(int(0.9 * whole), recomputes=False)
    assert 0 < len(few) < len(every), "nothing is recomputed: the budget is kept by few"
    assert sizes(whole, recomputes=False) == [] == sizes(0, recomputes=True)
    assert sizes(whole, recomputes=True, one_graph=False) == []
    assert sizes(whole, recomputes=True, rewriting=SimpleNamespace(passes=WITHOUT)) == []
    assert sizes(whole, recomputes=True, table=SimpleNamespace(link=lambda device: (0.0, 0.0))) == []
    assert sizes(whole, recomputes=True, table=SimpleNamespace(link=lambda device: (1e3, 1e3))) == [], "too slow"
    monkeypatch.setattr(engine, "may_wait", lambda costs: True)
    assert sizes(whole, recomputes=True) == [], "its host has enough to do"


def test_what_cannot_wait(graphs):
    forward, backward, outputs, _ = graphs
    whole = candidates(forward, backward, outputs, 2**14)
    results_ = forward.graph.output_node()
    view = _view_of(forward, whole[0])
    for change in ((whole[0], *results_.args[0][outputs:]), (*results_.args[0], view)):
        before, results_.args = results_.args, (tuple(change),)
        at = 1 if change[0] is whole[0] else outputs
        assert candidates(forward, backward, at, 2**14) == whole[1:], "the caller has it, or a view is saved as well"
        results_.args = before
    forward.graph.erase_node(view)
    assert candidates(forward, backward, outputs, 2**40) == []


def _view_of(forward, node):
    with forward.graph.inserting_after(node):
        view = forward.graph.call_function(torch.ops.aten.t.default, (node,))
    view.meta["val"] = node.meta["val"].t()
    return view


def test_the_note_is_of_the_last_step_only():
    from memopt.memory.resident import Resident
    from memopt.step.session_report import SessionReport

    told = SessionReport(None, Resident())
    told.note("another")
    told.waits_on_host([])
    assert told.notes == ["another"]
    told.waits_on_host([3, 4])
    told.waits_on_host([2**20])
    assert told.notes[0] == "another" and told.notes[1].startswith(f"1 value waits, {format_bytes(2**20)}, in")
    told.waits_on_host(())
    assert told.notes == ["another"]
