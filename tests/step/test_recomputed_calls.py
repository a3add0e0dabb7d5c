"""A call that lets go of what it saved recomputes it as its backward begins: the same numbers, or an error."""

import gc

import pytest
import torch
import torch.nn.functional as F

from memopt.step.recomputed_calls import recomputable


def _made(run, *args, written=()):
    listed = []
    outputs = recomputable(run, written, "Net", lambda: listed)(*args)
    (call,) = listed
    return outputs, call()


def _inputs():
    torch.manual_seed(0)
    return torch.randn(64, 16), torch.randn(16, 16, requires_grad=True)


def _dropped_out(x, w):
    return (F.dropout(F.gelu(x @ w), 0.5).tanh() @ w,)


def test_gradients_are_the_same_and_random_numbers_are_drawn_as_before():
    x, w = _inputs()
    torch.manual_seed(1)
    _dropped_out(x, w)[0].square().sum().backward()
    wanted, w.grad, after = w.grad, None, torch.rand(2)
    torch.manual_seed(1)
    (out,), call = _made(_dropped_out, x, w)
    loss = out.square().sum()
    call.drop()
    loss.backward()
    torch.testing.assert_close(w.grad, wanted, rtol=0, atol=0)
    torch.testing.assert_close(torch.rand(2), after, rtol=0, atol=0)


def test_what_is_dropped_is_free_and_only_outputs_are_counted():
    x, w = _inputs()
    freed = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x.exp()
            ctx.save_for_backward(y.clone())
            return y

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.saved_tensors[0]

    (out,), call = _made(lambda x, w: (Watched.apply(x @ w).sum(1),), x, w)
    values = [value for value, _ in call._saved]
    freed = [torch.multiprocessing.reductions.StorageWeakRef(value.untyped_storage()) for value in values]
    del values
    call.drop()
    gc.collect()
    assert sum(each.expired() for each in freed) == 1  # the arguments are the caller's
    assert call.kept_bytes == out.nbytes and call.returned_bytes == 0
    out.sum().backward()
    torch.testing.assert_close(w.grad, x.T @ (x @ w).exp())


def test_what_it_writes_to_is_recomputed_from_what_it_was_and_stays_as_it_is():
    x, w = _inputs()
    count = torch.ones(3)

    def run(x, w, count):
        count += 1
        return ((x @ w * count[0]).tanh(),)

    (out,), call = _made(run, x, w, count, written=(2,))
    call.drop()
    out.sum().backward()
    assert count.tolist() == [2, 2, 2]
    wanted = torch.autograd.grad((x @ w * 2).tanh().sum(), w)[0]
    torch.testing.assert_close(w.grad, wanted)


@pytest.mark.parametrize("drop", [False, True])
def test_an_argument_that_was_changed_is_refused(drop):
    x, w = _inputs()
    (out,), call = _made(lambda x, w: ((x @ w).tanh(),), x, w)
    if drop:
        call.drop()
    with torch.no_grad():
        w.add_(1)
        x.add_(1)
    with pytest.raises(RuntimeError, match="was changed"):
        out.sum().backward()


def test_an_output_that_is_read_and_was_changed_is_refused_and_one_that_is_recomputed_is_not():
    x, w = _inputs()
    (out,), _ = _made(lambda x, w: ((x @ w).tanh(),), x, w)
    with torch.no_grad():
        out.mul_(2)
    with pytest.raises(RuntimeError, match="was changed"):
        out.sum().backward()
    (out,), call = _made(lambda x, w: ((x @ w).tanh(),), x, w)
    call.drop()
    with torch.no_grad():
        out.mul_(2)
    out.sum().backward()
    torch.testing.assert_close(w.grad, torch.autograd.grad((x @ w).tanh().sum(), w)[0])


@pytest.mark.parametrize("drop", [False, True])
def test_a_graph_that_is_kept_runs_twice_and_one_that_is_not_does_not(drop):
    x, w = _inputs()
    (out,), call = _made(lambda x, w: ((x @ w).tanh(),), x, w)
    if drop:
        call.drop()
    out.sum().backward(retain_graph=True)
    first, w.grad = w.grad, None
    out.sum().backward()
    torch.testing.assert_close(w.grad, first, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


def test_nothing_is_kept_alive_by_itself():
    x, w = _inputs()
    gc.collect()
    gc.disable()
    try:
        (out,), call = _made(lambda x, w: ((x @ w).tanh(),), x, w)
        listed = torch.multiprocessing.reductions.StorageWeakRef(out.untyped_storage())
        del out, call
        assert listed.expired()
    finally:
        gc.enable()


def test_where_hooks_are_forbidden_a_call_runs_as_it_is():
    x, w = _inputs()
    listed = []
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        (out,) = recomputable(lambda x, w: ((x @ w).tanh(),), (), "Net", lambda: listed)(x, w)
    out.sum().backward()
    assert listed == [] and w.grad is not None
