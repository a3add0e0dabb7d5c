"""Backward in pieces: what its code holds is let go of as backward ends, whatever no relay has asked for."""

import gc
import weakref

import torch

from memopt.backends.hand_over import drained, in_pieces, relayed
from memopt.step.hooked import ToBeGone


class Held:
    """Stands for what code holds behind its last hand-over."""


def test_code_behind_the_last_hand_over_lets_go_as_backward_ends_without_waiting_for_garbage():
    held = []

    def generate(args, give):
        there = Held()
        held.append(weakref.ref(there))
        give(0, [2 * args[0]])
        yield
        return [None] if there else []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):
            return 2 * weight

        @staticmethod
        def backward(ctx, gradient):
            return in_pieces(generate, 1, [[0]], lambda run: run)([gradient])[0]

    weight = torch.ones(3, requires_grad=True)
    loss = relayed(Twice.apply, [[0]], [0], ToBeGone([], print, [], print))(weight).sum()
    gc.disable()
    try:
        loss.backward()
        assert held[0]() is None
    finally:
        gc.enable()
    assert torch.equal(weight.grad, torch.full((3,), 2.0))


def test_a_run_from_begin_to_end_gives_or_drops_what_is_handed_over():
    def generate(args, give):
        give(0, args)
        yield
        return ["end"]

    given = []
    assert drained(generate, lambda number, values: given.append((number, values)))([1]) == ["end"]
    assert given == [(0, [1])] and drained(generate)([1]) == ["end"]
