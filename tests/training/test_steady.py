"""Training steps that take the short way: they are the same steps, and whatever changes between two is still seen."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memopt
import memopt.calls.model_calls
import memopt.calls.planned
from memopt.calls.guard_fast_path import Kind
from memopt.memory.allocator_limit import Allowance
from memopt.step import guard as step_guard
from tests.calls.test_guard_fast_path import image, net, ways
from tests.training.steps import assert_equal, budget_for, bytes_of, gradients, loop, make

GPU = torch.device("cuda", 0)


def trained(run, model, *args, seed=0, **kwargs):
    """The loss and the gradients of a step that finds no gradients, and leaves none."""
    torch.manual_seed(seed)
    loss = run(*args, **kwargs).square().mean()
    loss.backward()
    found = loss.detach(), gradients(model)
    model.zero_grad()
    return found


def same(run, model, *args, **kwargs):
    assert_equal(trained(run, model, *args, **kwargs), trained(model, model, *args, **kwargs))


def steady(model, *args, budget="1GB", backend="aten", **options):
    """The compiled model after a step, the next of which takes the short way."""
    run = memopt.compile(model, budget, backend=backend, **options)
    with ways(run) as taken:
        same(run, model, *args)
        same(run, model, *args)
    assert taken == ["long", "short"]
    return run


@pytest.mark.quick("aten")
@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_steps_are_those_of_the_model(backend):
    dropout = 0.2 if backend == "aten" else 0.0  # which Inductor draws otherwise

    def followed(budget):
        model, x = make(dropout=dropout)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        run = model if budget is None else memopt.compile(model, budget, optimizer=optimizer, backend=backend)
        with contextlib.nullcontext([]) if budget is None else ways(run) as taken:
            losses = loop(run, optimizer, x, 5)
        assert taken == ([] if budget is None else ["long", *["short"] * 4])
        return losses, [parameter.detach() for parameter in model.parameters()]

    model, x = make(dropout=dropout)
    optimizer = torch.optim.Adam(model.parameters())
    found, expected = followed(budget_for(model, (x,), 0.5, optimizer=optimizer)), followed(None)
    if backend == "aten":
        assert_equal(found, expected)
    torch.testing.assert_close(found[0], expected[0])


def test_a_steady_step_looks_for_gradients_once_and_sets_nothing(monkeypatch):
    model, x = make()
    run = steady(model, x)
    looked, exist, find = [], run._memopt.gradients.exist, run._memopt.fast_path.find
    monkeypatch.setattr(run._memopt.gradients, "exist", lambda: looked.append("gradients") or exist())
    monkeypatch.setattr(
        run._memopt.fast_path, "find", lambda *args, **options: looked.append("guards") or find(*args, **options)
    )
    with monkeypatch.context() as patch:
        patch.delattr(memopt.calls.planned, "settings_of")
        for name in ("note_outside", "planning"):
            patch.delattr(memopt.calls.model_calls, name)
        for _ in range(3):
            same(run, model, x)
    assert looked == ["guards", "gradients"] * 3
    for _ in range(3):
        looked.clear()
        run(x).backward()
    assert looked == ["gradients", "guards"]  # of the plan that adds to those that exist


@pytest.mark.long
def test_gradients_that_exist_are_noticed_at_every_step():
    model, x = make(dropout=0.2)
    weights = bytes_of(list(model.parameters()))
    budget = budget_for(model, (x,), 0.3, more=weights)
    run = memopt.compile(model, budget, backend="aten")

    def step(call):
        torch.manual_seed(1)
        call(x).backward()

    def both():
        for _ in range(3):
            step(model)
        expected = gradients(model)
        model.zero_grad()
        reports = []
        for _ in range(3):
            step(run)
            reports.append(run.report)
        assert_equal(gradients(model), expected)
        model.zero_grad()
        return [report.breakdown.gradients >= weights for report in reports], reports

    with ways(run) as taken:
        both()
        assert taken == ["long", "long", "short"]
        for _ in range(2):
            assert both()[0] == [False, True, True]
    assert taken[3:] == ["short"] * 6


def given_gradient(parameter):
    parameter.grad = torch.zeros_like(parameter)
    return parameter


@pytest.mark.long
def test_gradients_of_what_was_replaced_or_added_are_noticed():
    model, x = make()
    run = steady(model, x)
    first, other = run._memopt.sessions[Kind(True, False).plan], model.layers[0].weight
    model.layers[0].weight = given_gradient(nn.Parameter(other.detach().clone()))
    run(x)
    second = run._memopt.last
    assert second is run._memopt.sessions[Kind(True, True).plan] is not first
    model.layers[0].weight = other
    run(x)
    assert run._memopt.last is first
    model.layers[0].extra = nn.Linear(2, 2)  # of no use to forward
    run(x)
    assert run._memopt.last is first
    given_gradient(model.layers[0].extra.bias)
    run(x)
    assert run._memopt.last is second
    del model.layers[0].extra
    with ways(run) as taken:
        same(run, model, x)
    assert run._memopt.last is first and taken == ["short"]


@pytest.mark.long
def test_evaluation_and_other_shapes_in_between():
    model, x = make(dropout=0.3)
    run = steady(model, x)
    for _ in range(2):
        for part in (x[:64], x, x[:100]):
            same(run, model, part)
            model.eval()
            with torch.no_grad():
                assert_equal(run(part), model(part))
            with torch.inference_mode():
                assert_equal(run(part), model(part))
            same(run, model, part)  # in evaluation mode with gradients
            model.train()
            with torch.no_grad():
                torch.manual_seed(2)
                found = run(part)
                torch.manual_seed(2)
                assert_equal(found, model(part))
    with ways(run) as taken:
        for part in (x[:64], x, x[:100]):
            same(run, model, part)
    assert taken == ["short"] * 3


def test_what_a_model_writes_to_itself_is_written():
    model, copied = net().train(), net().train()
    copied.load_state_dict(model.state_dict())
    run = memopt.compile(model, "1GB", backend="aten")
    with ways(run) as taken:
        for number in range(4):
            x = image()
            found, expected = trained(run, model, x, seed=number), trained(copied, copied, x, seed=number)
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(list(model.buffers()), list(copied.buffers()))
    assert taken == ["long", *["short"] * 3] and model.norm.num_batches_tracked == 4


@pytest.mark.long
def test_parameters_that_are_frozen_replaced_or_of_another_dtype_are_seen():
    model, x = make()
    run = steady(model, x)
    model.layers[1].requires_grad_(False)
    same(run, model, x)
    model.layers[1].requires_grad_(True)
    with ways(run) as taken:
        same(run, model, x)
        model.layers[1].weight = nn.Parameter(torch.randn_like(model.layers[1].weight))
        same(run, model, x)
        with torch.no_grad():
            model.layers[2].bias.add_(1.0)
        same(run, model, x)
    assert taken == ["short"] * 3
    same(run, model, x.clone().requires_grad_())
    model.double()
    same(run, model, x.double())
    model.layers[0].weight.data = model.layers[0].weight.detach().float()
    with pytest.raises(RuntimeError):
        run(x.double())


def test_autocast_is_seen():
    model, x = make()
    run = steady(model, x)
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = trained(run, model, x)
            torch.testing.assert_close(found, trained(model, model, x), rtol=0.1, atol=0.01)
        same(run, model, x)


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_hooks_are_called():
    model, x = make()
    run = steady(model, x)
    seen = []
    handles = [
        model.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
        model.register_forward_hook(lambda module, args, output: output * 3),
        run.register_forward_hook(lambda *_: seen.append("own")),
    ]
    for _ in range(2):
        same(run, model, x)
    assert seen == ["own"] * 2
    for handle in handles:
        handle.remove()
    handle = model.register_full_backward_hook(lambda *_: seen.append("backward"))
    trained(run, model, x)
    assert seen.pop() == "backward"
    handle.remove()
    with ways(run) as taken:
        same(run, model, x)
    assert taken == ["short"]


def test_hooks_for_saved_tensors_are_called():
    model, x = make()
    run = steady(model, x)
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return tensor

    expected = trained(model, model, x)
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            assert_equal(trained(run, model, x), expected)
        assert packed
        packed.clear()
    assert_equal(trained(run, model, x), expected)
    assert not packed


@pytest.mark.quick("True")
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_model_that_is_computed_again_in_backward(reentrant):
    model, x = make(dropout=0.2)
    run = memopt.compile(model, "1GB", backend="aten")
    x.requires_grad_()
    for seed in range(3):
        same(lambda x: checkpoint(run, x, use_reentrant=reentrant), model, x, seed=seed)
        same(run, model, x, seed=seed)


class Locked(nn.Module):
    """A model that Dynamo gives up once it is told to."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.lock, self.breaks = threading.Lock(), False

    def forward(self, x):
        x = self.first(x).tanh()
        if self.breaks:
            with self.lock:
                x = x.exp()
        return self.second(x)


def test_what_runs_outside_of_graphs_is_told_once_it_does():
    model, x = Locked(), torch.randn(4, 8)
    run = steady(model, x, budget=None)
    assert not any("outside" in note for note in run.report.notes)
    model.breaks = True
    for _ in range(3):
        same(run, model, x)
    assert any("outside" in note for note in run._memopt.last.notes)
    model.breaks = False
    with ways(run) as taken:
        same(run, model, x)
    assert taken == ["short"]


def test_steps_that_fail_change_nothing_for_the_next():
    model, x = make()
    run = steady(model, x)
    expected = trained(model, model, x)
    for bad in (torch.randn(3, 5), x.double(), "text"):
        with pytest.raises((RuntimeError, AttributeError, TypeError)):
            run(bad)
        with ways(run) as taken:
            assert_equal(trained(run, model, x), expected)
        assert taken == ["short"]
    with pytest.raises(TypeError):
        run()
    assert_equal(trained(run, model, x), expected)


def test_memory_that_runs_out_is_told_in_one_line():
    model, x = make()
    run = steady(model, x)

    def fail(*args):
        raise torch.OutOfMemoryError("no memory")

    graph = run._memopt.fast_path._known[Kind(True, False)].graphs[0]
    call, graph.call = graph.call, fail
    with pytest.raises(MemoryError, match="memory ran out in a step planned to take"):
        run(x)
    graph.call = call
    with ways(run) as taken:
        same(run, model, x)
    assert taken == ["short"]


def test_the_limit_is_in_force_in_forward_and_backward(monkeypatch):
    held, seen, grown = [], [], []
    model, x = make()
    run = steady(model, x)

    def enter(device, limit):
        held.append(limit)
        return 0, limit

    monkeypatch.setattr(step_guard, "enter", enter)
    monkeypatch.setattr(step_guard, "leave", lambda token: held.remove(token[1]))
    monkeypatch.setattr(step_guard, "grow", lambda device, size, there, **_: grown.append((size, list(held))))
    stats = {name: {"all": {"current": 50}} for name in ("allocated_bytes", "reserved_bytes")}
    asked = []
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: asked.append(device) or stats)
    session = run._memopt.sessions[Kind(True, False).plan]
    session.beyond = 30
    run._memopt.guards[session].allow(Allowance(GPU, 1000, 50, 50))
    graph = run._memopt.fast_path._known[Kind(True, False)].graphs[0]
    call = graph.call

    def watched(*args):
        seen.append(list(held))
        return call(*args)

    graph.call = watched
    handle = model.norm.weight.register_hook(lambda gradient: seen.append(list(held)))
    for _ in range(3):
        with ways(run) as taken:
            loss = run(x)
        assert held == [] and taken == ["short"] and grown.pop() == (80, [1000])
        loss.backward()
        model.zero_grad()
        assert held == [] and seen == [[1000], [1000]]
        seen.clear()
    assert len(asked) == 3  # once in a step
    handle.remove()
    with torch.no_grad():  # what such a call takes is not known
        run(x)
    assert grown == [] and held == []
