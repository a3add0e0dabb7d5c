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
