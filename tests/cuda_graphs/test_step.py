"""Captured graphs of a step: the same numbers as the code's own, and the code itself where anything differs."""

from __future__ import annotations

import gc

import pytest
import torch

from memopt.cuda_graphs.aliases import seen, storage_at, view
from memopt.cuda_graphs.pool import GraphPool
from memopt.cuda_graphs.signature import StepSignature, signature_of
from memopt.cuda_graphs.step import CudaGraphStep, NotCapturable
from memopt.host.operators import ARRIVED, FETCH, LANDED, TO_HOST
from tests.cuda_graphs.tape import Tape


class Code:
    """The graphs of y = (tanh(x·w))·w summed, with a count of calls in a buffer, as generated code has them."""

    def __init__(self):
        self.calls = []

    def forward(self, args):
        weight, count, x = args
        args.clear()
        self.calls.append("forward")
        count.add_(1)
        hidden = torch.tanh(x * weight)
        return [(hidden * weight).sum(), weight, x, hidden]

    def backward(self, args):
        weight, x, hidden, tangent = args
        args.clear()
        self.calls.append("backward")
        inner = tangent * weight * (1 - hidden * hidden)
        return [(inner * x).sum() + (tangent * hidden).sum(), None, inner * weight]


class Waiting(Code):
    """The same, with what is saved of it waiting on the host."""

    def forward(self, args):
        result, *saved, hidden = super().forward(args)
        return [result, *saved, LANDED(hidden, TO_HOST(hidden))]

    def backward(self, args):
        *saved, held, tangent = args
        args.clear()
        return super().backward([*saved, ARRIVED(FETCH(held, tangent.device), held), tangent])


SIGNATURE = StepSignature(frozenset({0, 1}), 1, 3)


def step_of(code, pool=None, signature=SIGNATURE):
    step = CudaGraphStep(code.forward, code.backward, signature, pool or GraphPool(Tape()))

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args):
            result, *saved = step.forward(list(args))
            ctx.save_for_backward(*saved)
            return result

        @staticmethod
        def backward(ctx, tangent):
            return tuple(step.backward([*ctx.saved_tensors, tangent]))

    return step, Function.apply


@pytest.fixture
def case():
    torch.manual_seed(0)
    return torch.tensor(0.7, requires_grad=True), torch.zeros(()), [torch.randn(6) for _ in range(6)]


def expected(weight, x):
    own, x = weight.detach().clone().requires_grad_(), x.clone().requires_grad_()
    loss = (torch.tanh(x * own) * own).sum()
    return loss, *torch.autograd.grad(loss, [own, x])


def check(run, weight, count, x, **options):
    given = x.clone().requires_grad_()
    loss = run(weight, count, given)
    found = torch.autograd.grad(2 * loss, [weight, given], **options)
    known = expected(weight, x)
    near = 1e-6 if x.numel() < 1000 else 1e-4  # what is summed in another order
    torch.testing.assert_close((loss, *found), (known[0], 2 * known[1], 2 * known[2]), rtol=near, atol=1e-6)
    return loss, found


def test_what_waits_on_the_host_is_captured_too(case):
    weight, count, values = case
    code = Waiting()
    step, run = step_of(code)
    step.start()
    for x in values:
        check(run, weight, count, x)
    assert not step.reason and step._run_backward is not None


def test_steps_run_as_they_were_captured_on_other_values(case):
    weight, count, inputs = case
    code, (step, run) = (made := Code()), step_of(made)
    check(run, weight, count, inputs[0])
    assert code.calls == ["forward", "backward"]
    step.start()
    kept = [check(run, weight, count, x) for x in inputs]
    with torch.no_grad():
        weight.add_(0.25)
    check(run, weight, count, inputs[1])
    tape = step._pool.capturer
    assert (tape.captures, tape.replays) == (2, 14) and count == 8
    for (loss, found), x in zip(kept, inputs, strict=True):  # what a caller keeps stays as it was
        known = expected(torch.tensor(0.7), x)
        torch.testing.assert_close((loss, *found), (known[0], 2 * known[1], 2 * known[2]), rtol=1e-6, atol=1e-6)


def test_a_second_forward_before_backward_runs_beside_the_first(case):
    weight, count, (x, y, *_) = case
    code, (step, run) = (made := Code()), step_of(made)
    step.start()
    check(run, weight, count, x)
    code.calls.clear()
    a, b = x.clone().requires_grad_(), y.clone().requires_grad_()
    first, second = run(weight, count, a), run(weight, count, b)
    (first + second).backward()
    torch.testing.assert_close(a.grad, expected(weight, x)[2])
    torch.testing.assert_close(b.grad, expected(weight, y)[2])
    assert code.calls.count("forward") == 2  # one of them by the tape
    assert not step._pool.busy
    check(run, weight, count, y)


def test_a_loss_that_is_dropped_leaves_the_memory_to_the_next_step(case):
    weight, count, (x, y, *_) = case
    step, run = step_of(Code())
    step.start()
    check(run, weight, count, x)
    loss = run(weight, count, x)
    assert step._pool.busy
    del loss
    gc.collect()
    assert not step._pool.busy
    check(run, weight, count, y)
    assert step._pool.capturer.captures == 2


def test_a_graph_that_is_kept_is_run_by_the_code_until_it_is_not(case):
    weight, count, (x, *_) = case
    step, run = step_of(Code())
    step.start()
    check(run, weight, count, x)
    loss = run(weight, count, x)
    known = expected(weight, x)[1]
    for kept in (True, True, False):
        (found,) = torch.autograd.grad(loss, [weight], retain_graph=kept)
        torch.testing.assert_close(found, known)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, [weight])
    check(run, weight, count, x)


def test_a_weight_that_lies_elsewhere_is_captured_anew(case):
    weight, count, (x, *_) = case
    step, run = step_of(Code())
    step.start()
    check(run, weight, count, x)
    weight.data = torch.tensor(0.3)
    check(run, weight, count, x)
    assert step._pool.capturer.captures == 4 and step._pool.capturer.releases == 1


def test_gradients_are_lent_until_the_next_step_and_what_is_held_is_copied(case):
    weight, count, (x, y, z, *_) = case
    step, run = step_of(Code(), GraphPool(Tape(), lambda: [weight.grad] if weight.grad is not None else []))
    step.start()
    run(weight, count, x).backward()
    kept, place = weight.grad, weight.grad.data_ptr()
    run(weight, count, y)
    assert weight.grad is kept and kept.data_ptr() != place
    torch.testing.assert_close(kept, expected(weight, x)[1])
    weight.grad = None
    run(weight, count, z).backward()
    assert weight.grad.data_ptr() == place  # nothing was copied
    step._pool.release()
    assert weight.grad.data_ptr() != place
    torch.testing.assert_close(weight.grad, expected(weight, z)[1])


def test_a_gradient_that_is_held_unseen_is_not_written_over(case):
    weight, count, (x, y, *_) = case
    code, (step, run) = (made := Code()), step_of(made)
    step.start()
    (found,) = torch.autograd.grad(run(weight, count, x), [weight])
    unseen = found.view(1)
    del found
    code.calls.clear()
    check(run, weight, count, y)
    assert code.calls == ["forward", "backward"] and "held" in step.reason
    torch.testing.assert_close(unseen[0], expected(weight, x)[1])
    check(run, weight, count, y)


def test_steps_that_take_turns_are_captured_once_they_come_several_times_in_a_row(case):
    weight, count, (x, *_) = case
    pool = GraphPool(Tape())
    (one, first), (other, second) = step_of(Code(), pool), step_of(Code(), pool)
    one.start()
    other.start()

    def captures(*runs):
        before = pool.capturer.captures
        for run in runs:
            check(run, weight, count, x)
        return (pool.capturer.captures - before) // 2

    assert captures(first, second) == 2, "little came of the first"
    assert captures(*[first, second] * 12) == 0, "nor of the second"
    assert captures(first) == 0 and captures(first) == 1, "it has come twice in a row"
    assert captures(*[first] * 9) == 0 and captures(second) == 1, "much came of that one"
    assert captures(first, second) == 1, "it may happen once"
    one.start(needed=True)
    assert captures(second, first, second, first) == 3, "the first each time, as it has no room otherwise"


def test_calls_of_other_kinds_between_them_begin_the_count_anew(case):
    weight, count, (x, *_) = case
    pool = GraphPool(Tape())
    step, run = step_of(Code(), pool)
    step.start()
    for _ in range(5):
        check(run, weight, count, x)
        pool.release()  # as an evaluation has it
    assert pool.capturer.captures == 2 * 2
    for _ in range(3):
        check(run, weight, count, x)
    assert pool.capturer.captures == 2 * 3
    pool.release()
    step.start()
    check(run, weight, count, x)
    assert pool.capturer.captures == 2 * 4, "a trial is captured at once"


@pytest.mark.parametrize("failing", [[True], [False, True]], ids=["forward", "backward"])
def test_what_cannot_be_captured_runs_as_it_is(case, failing):
    weight, count, (x, y, *_) = case
    step, run = step_of(Code())
    step._pool.capturer.failing = failing
    step.start()
    check(run, weight, count, x)
    check(run, weight, count, y)
    assert step.reason == "CUDA out of memory." and step._pool.capturer.releases == 1
    assert count == 2


def test_a_pool_is_not_given_back_under_a_backward_that_needs_it(case):
    weight, count, (x, *_) = case
    step, run = step_of(Code())
    step.start()
    given = x.clone().requires_grad_()
    loss = run(weight, count, given)
    step._pool.release()
    loss.backward()
    torch.testing.assert_close(given.grad, expected(weight, x)[2])
    step._pool.release()
    assert step._pool.capturer.releases == 1
    weight.grad = None
    check(run, weight, count, x)


class Shelf(Tape):
    """A capturer whose copies of arguments lie in memory that stays; what holds them is seen."""

    def __init__(self):
        super().__init__()
        self.memory, self.held = torch.zeros(100), []

    def blank(self, value):
        copy = view(storage_at(self.memory, {}), value)
        self.held.append(seen(copy.untyped_storage()))
        return copy.copy_(value)


class Forgetful(Code):
    """The same, with nothing saved of x but a copy that is made where x is let go of."""

    def forward(self, args):
        weight, _, x = args
        args.clear()
        hidden, twice = torch.tanh(x * weight), x + 0
        del x
        self.free = [storage.expired() for storage in self.shelf.held]
        return [(hidden * weight).sum(), weight, twice, hidden]


def test_a_cuda_graph_lets_go_of_what_it_was_given_where_the_code_does(case):
    weight, count, (x, *_) = case
    code, shelf = Forgetful(), Shelf()
    code.shelf = shelf
    step, run = step_of(code, GraphPool(shelf))
    step.start()
    check(run, weight, count, x)
    assert code.free[0] and all(storage.expired() for storage in shelf.held)
    with torch.no_grad(), pytest.raises(NotCapturable, match="shares memory"):
        step_of(Same(), GraphPool(Shelf()))[0]._capture_forward([weight, count, x])


class Same(Code):
    """Returns what it was given."""

    def forward(self, args):
        return [args[2].view(2, 3), *args]


def test_ends_are_known_by_the_names_of_values():
    found = signature_of(["w", "b", "x"], ["loss", "w", "h"], ["w", "h", "tangent"], {"w", "b", "other"})
    assert found == StepSignature(frozenset({0, 1}), 1, 2)
    found = signature_of(["x", "w"], ["loss", "h"], ["h", "tangent"], {"w"}, ["x", "w", None])
    assert found == StepSignature(frozenset({1}), 1, 1, (-1, 1, -1))
    assert signature_of(["x"], ["loss"], ["tangent"], ()) == StepSignature(frozenset(), 1, 0)
    assert signature_of(["w", "x"], ["h", "loss"], ["h", "tangent"], ()) is None


class Transposed:
    """The graphs of (w·x) summed, whose gradients lie otherwise than w and x."""

    def forward(self, args):
        weight, x = args
        args.clear()
        return [(weight * x).sum(), weight, x.clone()]

    def backward(self, args):
        weight, x, tangent = args
        args.clear()
        return [(tangent * other).t().contiguous().t() for other in (x, weight)]


def test_gradients_lie_as_their_parameters_do():
    """Autograd keeps such a gradient as it is, and copies any other."""
    step, run = step_of(Transposed(), signature=StepSignature(frozenset({0}), 1, 2, (0, -1)))
    weight, x = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    step.start()
    gradient, other = torch.autograd.grad(run(weight, x), [weight, x])
    assert step._pool.capturer.captures == 2
    assert gradient.stride() == weight.stride() and other.stride() == (1, 3)
    torch.testing.assert_close((gradient, other), (x.detach(), weight.detach()))
