"""The guard of a model's steps: when it is in force, for how much, and what the user reads when memory runs out."""

from __future__ import annotations

import dataclasses
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import memopt
from memopt.calls.guard_fast_path import Kind
from memopt.errors import ShortOfMemoryError
from memopt.memory.allocator import slack_bytes
from memopt.memory.allocator_limit import Allowance, Held, held_now
from memopt.step import guard as step_guard
from memopt.step.guard import StepGuard
from tests.training.steps import gradients, make

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


GPU = torch.device("cuda", 0)
SPARE = slack_bytes(10**9, GPU)


def holds(monkeypatch, size):
    """A device whose allocator has so many bytes allocated."""
    stats = {name: {"all": {"current": size}} for name in ("allocated_bytes", "reserved_bytes")}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: size)


@pytest.fixture
def limits(monkeypatch):
    """What is in force: limits are entered into and left from this list."""
    held = []

    def enter(device, limit):
        assert device == GPU
        held.append(limit)
        return 0, limit

    monkeypatch.setattr(step_guard, "enter", enter)
    monkeypatch.setattr(step_guard, "leave", lambda token: held.remove(token[1]))
    holds(monkeypatch, 50)
    monkeypatch.setattr(step_guard, "grow", lambda device, size, held: None)
    return held


def test_the_limit_is_in_force_in_forward_and_in_backward_only(limits):
    guard = StepGuard()
    guard.allow(Allowance(GPU, 1000, 50, 50))
    weight = torch.ones(4, requires_grad=True)
    with guard.forward():
        assert limits == [1000]
        inside = []
        weight.register_hook(lambda gradient: inside.append(list(limits)))
        out = {"loss": (weight * 2).sum(), "other": 3}
    guard.backward(out)
    assert limits == []
    for _ in range(2):
        out["loss"].backward(retain_graph=True)
        assert inside.pop() == [1000] and limits == []


def test_a_step_that_was_measured_has_its_memory_from_the_start(limits, monkeypatch):
    grown = []
    monkeypatch.setattr(step_guard, "grow", lambda device, size, held, **_: grown.append((size, list(limits))))
    guard = StepGuard()
    with guard.forward(300):
        assert grown == []
    guard.allow(Allowance(GPU, 1000, 50, 50, coming_bytes=20))
    with guard.forward(300):
        assert grown == [(370, [1000])]
    with guard.forward(2000):
        assert grown.pop() == (1000, [1000])
    with guard.forward():
        pass
    assert len(grown) == 1


def test_a_cache_that_others_had_handed_back_is_taken_anew(limits, monkeypatch):
    pieces = []

    def grow(device, size, held, anew, in_pieces):
        pieces.append(in_pieces)
        return in_pieces

    monkeypatch.setattr(step_guard, "grow", grow)
    # In MiB. At its limit it hands back itself in the sixth step; others have it before the third, fourth and ninth.
    looks = [(900, 0), (900, 0), (400, 0), (400, 0), (849, 0), (900, 0), (300, 1), (300, 1), (200, 1)]
    held = (Held(50 * 2**20, size * 2**20, retries) for size, retries in looks)
    monkeypatch.setattr(step_guard, "held_now", lambda device: next(held))
    guard = StepGuard()
    guard.allow(Allowance(GPU, 1000 * 2**20, 50 * 2**20, 50 * 2**20))
    for _ in looks:
        with guard.forward(800 * 2**20):
            pass
    assert pieces == [False, False, True, True, False, False, False, False, True]


def test_it_is_in_force_while_the_optimizer_steps_too(limits):
    weight = torch.ones(4, requires_grad=True)
    weight.grad = torch.ones(4)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    inside = []
    guard = StepGuard()
    guard.during(optimizer)
    guard.during(optimizer)
    optimizer.register_step_pre_hook(lambda *_: inside.append(list(limits)))
    optimizer.step()
    guard.allow(Allowance(GPU, 1000, 50, 50))
    optimizer.step()  # no forward has run yet
    with guard.forward():
        pass
    optimizer.step()
    assert inside == [[], [], [1000]] and limits == []
    handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert limits == [1000]  # torch calls nothing back
    with guard.forward():
        assert limits == [1000]
    assert limits == []
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    del guard
    assert limits == []
    handle.remove()
    optimizer.step()
    assert limits == []


def test_it_begins_in_the_middle_of_the_forward_that_plans(limits):
    guard = StepGuard()
    with guard.forward():
        assert limits == []
        guard.allow(Allowance(GPU, 1000, 50, 50))
        assert limits == [1000]
        guard.allow(Allowance(GPU, 3000, 50, 50))
        assert limits == [3000]
        guard.allow(Allowance(GPU, 2000, 50, 50))
        assert limits == [3000]
    assert limits == []
    guard.allow(Allowance(GPU, 4000, 50, 50))
    assert limits == []


def test_an_error_leaves_nothing_in_force(limits):
    guard = StepGuard()
    guard.allow(Allowance(GPU, 1000, 50, 50))
    with pytest.raises(KeyboardInterrupt), guard.forward():
        raise KeyboardInterrupt
    assert limits == []


def test_a_backward_that_fails_leaves_nothing_in_force(limits):
    guard = StepGuard()
    guard.allow(Allowance(GPU, 1000, 50, 50))
    weight = torch.ones(4, requires_grad=True)
    seen = []

    def fail(gradient):
        seen.append(list(limits))
        raise MemoryError

    weight.register_hook(fail)
    with guard.forward():
        out = (weight * 2).sum()
    guard.backward(out)
    with pytest.raises(MemoryError):
        out.backward()
    assert seen == [[1000]] and limits == []


def test_outputs_without_gradients_are_left_alone(limits):
    guard = StepGuard()
    guard.backward(torch.ones(3).requires_grad_().sum())
    guard.allow(Allowance(GPU, 1000, 50, 50))
    guard.backward([torch.ones(3), torch.ones(3, requires_grad=True), None])
    assert limits == []


def test_a_compiled_model_says_what_is_its_own(monkeypatch):
    model, x = make(layers=1)
    optimizer = torch.optim.Adam(model.parameters())
    run = memopt.compile(model, "1GB", optimizer=optimizer, backend="aten")
    run(x).backward()
    session = run._memopt.sessions[Kind(True, False).plan]
    session.resident = dataclasses.replace(session.resident, device=GPU, inputs=100, libraries=10)
    holds(monkeypatch, 10**6)
    given_back = []

    class Function:
        """One of an evaluation, which holds memory between calls."""

        def release(self):
            given_back.append(self)

    function = Function()
    session.functions.add(function)
    # The rest is what planning left.
    monkeypatch.setattr("memopt.step.guard.allocated_after_gc", lambda device: 9 * 10**5)
    monkeypatch.setattr("memopt.step.guard.pooled_bytes", lambda device: 77)
    session.hold(10**9)
    allowance = run._memopt.guards[session].allowance
    assert given_back, "what is the model's own is not on top of the budget"
    session.functions.discard(function)
    monkeypatch.setattr("memopt.step.guard.pooled_bytes", lambda device: 500)  # its own graphs are among them by now
    session.hold(10**9)
    assert run._memopt.guards[session].allowance.pooled_bytes == 77
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert allowance.own_bytes == 2 * weights + 100
    assert (allowance.limit_bytes, allowance.allocated_bytes) == (10**9, 9 * 10**5)
    assert allowance.coming_bytes == session.resident.optimizer_state + 10 > 10
    optimizer.step()
    session.hold(10**9)
    allowance = run._memopt.guards[session].allowance
    assert allowance.coming_bytes == 10 and allowance.own_bytes > 4 * weights
    monkeypatch.setattr("memopt.step.guard.gathered_bytes", lambda model: 30)
    session.hold(10**9)
    assert run._memopt.guards[session].allowance.own_bytes == allowance.own_bytes + 30, "FSDP2's are not others'"
    del run
    session.hold(10**9)


@pytest.mark.parametrize(
    ("budget", "others", "more"),
    [(0.9, 0, 0), (0.9, 7, 7), (0.9, 10**6, 10**6), ("1GB", 10**6, 0), ("1GB", 10**8, 10**8 - SPARE)],
    ids=["a share", "and few bytes", "and others", "others inside", "others beyond what is spare"],
)
def test_what_others_hold_is_allowed_beside_a_share_and_inside_a_budget_in_bytes(monkeypatch, budget, others, more):
    model, x = make(layers=1)
    run = memopt.compile(model, budget, backend="aten")
    run(x)
    session = run._memopt.sessions[Kind(True, False).plan]
    session.resident = dataclasses.replace(session.resident, device=GPU, inputs=100, libraries=65)
    there = sum(parameter.nbytes for parameter in model.parameters()) + 100 + others
    for now in (there, there + 65):  # without the buffers, and with them
        holds(monkeypatch, now)
        monkeypatch.setattr("memopt.step.guard.allocated_after_gc", lambda device: there)
        monkeypatch.setattr("memopt.step.guard.pooled_bytes", lambda device: 0)
        session.hold(10**9)
        allowance = run._memopt.guards[session].allowance
        for later in (there, there + 65):
            holds(monkeypatch, later)
            assert allowance.limit(held_now(GPU)) == 10**9 + more
    assert any("that no tensor shows" in note for note in run.report.notes) is (budget == "1GB" and more > 0)


def test_memory_that_runs_out_in_a_step_is_one_clear_line(monkeypatch):
    model, x = make(layers=1)
    run = memopt.compile(model, "1GB", backend="aten")
    run(x).backward()
    expected = gradients(model)
    model.zero_grad()

    def full(*args):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB of which "
            "5.31 GiB is free. 1.00 GiB allowed; Of the allocated memory\nSee"
        )

    with monkeypatch.context() as patch:
        patch.setattr(run._memopt.planned, "_call", full)
        patch.setattr(run._memopt.fast_path, "find", lambda *_, **__: None)  # the long way, as a first step goes
        with pytest.raises(MemoryError) as error:
            run(x)
    text = str(error.value)
    assert (
        "\n" not in text
        and "budget of 1.00 GB" in text
        and "Tried to allocate 2.00 GiB, 5.31 GiB free on the device)" in text
    )
    assert isinstance(model, nn.Module)
    run(x).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)


class Starving(TorchDispatchMode):
    """Memory runs out at the n-th operator that is called and may take some."""

    def __init__(self, calls):
        super().__init__()
        self.left = calls

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= func is not torch.ops.aten.detach.default
        if self.left == 0:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total of 8 GiB.\nSee"
            )
        result = func(*args, **(kwargs or {}))
        self.made = weakref.ref(result)
        return result


@pytest.mark.parametrize("backend", ["aten", pytest.param("inductor", marks=pytest.mark.slow)])
def test_memory_that_runs_out_in_a_later_backward_is_one_clear_line(backend):
    model, x = make(layers=2, dropout=0.2)
    run = memopt.compile(model, "1GB", backend=backend)

    def forward():
        torch.manual_seed(1)
        return run(x)

    forward().backward()
    expected = gradients(model)
    model.zero_grad()
    start = [parameter.clone() for parameter in model.parameters()]
    loss, starving = forward(), Starving(calls=3)
    with pytest.raises(MemoryError) as error, starving:
        loss.backward()
    text = str(error.value)
    assert "\n" not in text and "budget of 1.00 GB" in text and "Tried to allocate 2.00 GiB)" in text
    assert type(error.value) is ShortOfMemoryError
    assert starving.made() is None  # what the step made is free, though the error is not
    for parameter, value in zip(model.parameters(), start, strict=True):
        assert torch.equal(parameter, value) and parameter.grad is None
    del loss
    forward().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_plans_without_a_budget_or_for_another_device_limit_nothing(monkeypatch):
    held = []
    monkeypatch.setattr("memopt.calls.sessions.allow_limit", lambda owner, session, limit: held.append(limit))
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.ones(4, 8)
    memopt.plan(model, x)
    memopt.plan(model, x, "1GB", device="h100")
    assert held == []
    torch._dynamo.reset()
    memopt.plan(model, x, "1GB")
    assert held == [10**9]


def test_a_limit_that_falls_holds_for_later_steps():
    guard = StepGuard()
    guard.lowers(500)
    assert guard.allowance is None
    guard.allow(Allowance(GPU, 1000, 100, 100, 0, 0, SPARE))
    guard.lowers(1200)
    assert guard.allowance.limit_bytes == 1000
    guard.lowers(800)
    assert guard.allowance == Allowance(GPU, 800, 100, 100, 0, 0, SPARE)


def test_what_came_to_lie_on_the_device_raises_the_limit_and_is_told_when_it_is_news(limits, monkeypatch):
    guard = StepGuard()
    assert guard.newly_raised() == 0
    guard.allow(Allowance(GPU, 10_000, 100, 100, coming_bytes=50))
    found = []
    for there in (100, 150, 180, 1150, 1160, 150, 1150, 2150):  # the optimizer's state, a little, an arena, another one
        holds(monkeypatch, there)
        with guard.forward():
            assert limits == [10_000 + max(0, there - 150)]
        found.append(guard.newly_raised())
    assert found == [0, 0, 0, 1000, 0, 0, 0, 2000]
