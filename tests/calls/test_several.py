"""The kinds of the calls of a step; what several of them take is in `tests/training/test_several_calls.py`."""

import torch
from torch import nn

import memopt


def made(budget):
    torch._dynamo.reset()
    torch.manual_seed(0)
    return memopt.compile(nn.Linear(4, 4), budget, backend="aten"), torch.randn(2, 4)


def test_inference_between_forward_and_backward_is_planned_beside_what_is_saved():
    run, x = made("1GB")
    kind = run._memopt.several.kind
    assert not kind(False, False).beside
    loss = run(x).sum()
    assert kind(False, False).beside and not kind(True, False).beside
    loss.backward()
    assert not kind(False, False).beside


def test_without_a_budget_calls_are_planned_by_themselves():
    run, x = made(None)
    loss = run(x).sum()
    assert not run._memopt.several.kind(False, False).beside
    loss.backward()


def test_what_a_loop_keeps_in_backward_makes_no_plan_anew_that_has_room_for_it():
    run, x = made("1GB")
    sessions, logged = [], []
    for _ in range(3):
        loss = run(x).square().sum()
        logged.append(torch.empty(3000))
        loss.backward()
        run.zero_grad()
        sessions.append(run._memopt.sessions.last)
    assert run._memopt.sessions.around.seen.held >= 12_000
    assert sessions[0] is sessions[1] is sessions[2]


def test_what_another_model_hands_over_is_counted_once_and_plans_nothing_anew():
    # The critic is called with a batch and with what the generator has made, whose backward is still to come.
    torch._dynamo.reset()
    torch.manual_seed(0)
    models = nn.Linear(4, 64), nn.Linear(64, 1)
    make, judge = memopt.compile(list(models), "1GB", backend="aten")
    sessions = []
    for _ in range(5):
        made = make(torch.randn(8, 4))
        (judge(torch.randn(8, 64)).sum() - judge(made.detach()).sum()).backward()
        sessions.append([judge._memopt.sessions.last])
        judge(made).sum().backward()
        sessions[-1].append(judge._memopt.sessions.last)
        for model in models:
            model.zero_grad()
    assert sessions[-1] == sessions[-2] == sessions[-3]
