"""Large results of a captured forward: aliased until the next step, and seen by autograd where they are written to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memopt.cuda_graphs import results
from memopt.cuda_graphs.pool import GraphPool
from memopt.cuda_graphs.signature import StepSignature
from memopt.cuda_graphs.step import CudaGraphStep
from tests.cuda_graphs.tape import Tape


class Code:
    """The graphs of a loss and its logits, with what backward reads: the logits themselves, and another value."""

    def forward(self, args: list[Any]) -> list[Any]:
        weight, x = args
        args.clear()
        logits = x * weight
        hidden = logits.tanh()
        return [hidden.sum().reshape(1), logits, weight, x, logits, hidden]

    def backward(self, args: list[Any]) -> list[Any]:
        _, x, logits, hidden, tangent, other = args
        args.clear()
        inner = tangent * (1 - hidden * hidden) + other + 0 * logits
        return [(inner * x).sum(), None]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(results, "_LARGE", 64)
    code = Code()
    step = CudaGraphStep(code.forward, code.backward, StepSignature(frozenset({0}), 2, 4), GraphPool(Tape()))

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> tuple[Any, ...]:
            loss, logits, *saved = step.forward(list(args))
            ctx.save_for_backward(*saved)
            return loss, logits

        @staticmethod
        def backward(ctx: Any, *tangents: Any) -> Any:
            return tuple(step.backward([*ctx.saved_tensors, *(each.contiguous() for each in tangents)]))

    step.start()
    return step, Function.apply


WEIGHT, X = torch.tensor(0.5, requires_grad=True), torch.linspace(-1, 1, 32)


def gradient() -> torch.Tensor:
    return torch.autograd.grad((X * WEIGHT).tanh().sum(), [WEIGHT])[0]


def test_a_large_result_is_lent_and_copied_where_it_is_held(called: Any) -> None:
    step, run = called
    places, kept = set(), []
    for number in range(4):
        loss, logits = run(WEIGHT, X + number)
        places.add(logits.data_ptr())
        (found,) = torch.autograd.grad(loss.sum() + logits.sum(), [WEIGHT])
        inner = 1 - ((X + number) * WEIGHT.detach()).tanh() ** 2 + 1
        torch.testing.assert_close(found, (inner * (X + number)).sum())
        if number == 2:
            kept.append(logits)
        del logits, loss, found
    assert len(places) == 1 and step.reason == ""
    torch.testing.assert_close(kept[0].detach(), (X + 2) * WEIGHT.detach())
    assert kept[0].data_ptr() not in places


def test_a_write_to_a_result_that_is_saved_is_seen(called: Any) -> None:
    _, run = called
    for _ in range(2):
        loss, logits = run(WEIGHT, X)
        with torch.no_grad():
            logits.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.sum().backward()
        del loss, logits


def test_a_part_of_a_result_that_is_held_unseen_ends_the_cuda_graph(called: Any) -> None:
    step, run = called
    loss, logits = run(WEIGHT, X)
    part, before = logits.detach()[3:5], (X * WEIGHT.detach())[3:5].clone()
    loss.sum().backward()
    del loss, logits
    loss, _ = run(WEIGHT, X + 1)
    assert "held beyond the next step" in step.reason
    torch.testing.assert_close(part, before)
    loss.sum().backward()


def test_small_results_are_copied(called: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_LARGE", 2**20)
    step, run = called
    losses = []
    for _ in range(3):
        loss, logits = run(WEIGHT, X)
        losses.append(loss.detach())
        (found,) = torch.autograd.grad(loss.sum(), [WEIGHT])
        torch.testing.assert_close(found, gradient())
        del logits
    assert step.reason == "" and len({loss.data_ptr() for loss in losses}) == 3


def test_nothing_is_lent_that_is_all_that_is_saved() -> None:
    large = torch.zeros(2**20)
    assert results.aliased_places([large], [large.view(2, -1), large], [0, 1]) == []
    assert results.aliased_places([large], [large, torch.zeros(2)], [0, 1]) == [0]
    assert results.aliased_places([large, 3, None], [], []) == [0]
