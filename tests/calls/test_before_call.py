"""The state before a call, to return to."""

import torch
from torch import nn

from memopt.calls.before_call import BeforeCall
from tests.calls.test_verified import Model, X


def test_states_are_returned_to():
    model = Model()
    before = BeforeCall(model, (X,), {})
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    model(X)
    model.seen.append(1)
    model.extra, shared = 3, model._buffers
    before.restore()
    assert (model.calls, model.kept, model.seen, hasattr(model, "extra")) == (0, None, [], False)
    assert model._buffers is shared
    torch.testing.assert_close(dict(model.state_dict()), expected)
    assert torch.equal(torch.get_rng_state(), before.random[0])


def test_what_shows_elements_many_times_is_returned_to():
    base = torch.arange(6.0)
    given = base[:4].expand(2, 4), base.unfold(0, 3, 1), base[::2]
    before = BeforeCall(nn.Identity(), given, {})
    base.zero_()
    before.restore()
    assert base.equal(torch.arange(6.0))


def test_gradients_and_what_requires_them_are_returned_to():
    linear, x = nn.Linear(8, 2), X.clone()
    linear(x).sum().backward()
    gradient, known = linear.weight.grad, linear.weight.grad.clone()
    before = BeforeCall(linear, (x,), {})
    linear.bias.grad = None
    x.requires_grad_()
    linear(x).sum().backward()
    before.restore()
    assert linear.weight.grad is gradient and torch.equal(gradient, known)
    assert linear.bias.grad is not None and not x.requires_grad


def test_what_autograd_saw_no_write_to_keeps_its_count():
    """Earlier calls may have saved it for their backward."""
    linear = nn.Linear(8, 2)
    before, saved = BeforeCall(linear, (), {}), linear(X).square().sum()
    linear.weight.data.mul_(2)
    assert any(tensor.data_ptr() == linear.weight.data_ptr() for tensor in before.unwritten())
    before.restore()
    saved.backward()
    with torch.no_grad():
        linear.weight.mul_(2)
    assert not any(tensor.data_ptr() == linear.weight.data_ptr() for tensor in before.unwritten())


def test_what_was_written_to_is_again_what_earlier_calls_have_saved():
    linear, x = nn.Linear(8, 2), X.clone().requires_grad_()
    saved = linear(x).square().sum()
    before = BeforeCall(linear, (), {})
    with torch.no_grad():
        linear.weight.mul_(2)
    before.restore()
    saved.backward()
    assert torch.equal(linear.weight.grad, torch.autograd.grad(linear(x).square().sum(), linear.weight)[0])
