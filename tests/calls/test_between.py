"""What is written between forward and backward to compare gradients by."""

import torch
from torch import nn

from memopt.calls.before_call import BeforeCall
from memopt.calls.between import writes_between
from memopt.calls.sides import Sides

X = torch.linspace(-1, 1.5, 6 * 8).reshape(6, 8)


class Several(nn.Module):
    """Floating-point outputs, integers, and a buffer that it writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 2)
        self.register_buffer("total", torch.ones(()))

    def forward(self, x):
        self.total.add_(1)
        y = self.linear(x)
        return y, y.argmax(1), 3, y.detach().sum()


def test_what_a_loop_may_write_is_written_once_and_named():
    model, x = Several(), X.clone()
    before = BeforeCall(model, (x,), {})
    found = dict(writes_between(before, Sides(before, True).expected))
    assert list(found) == ["through .data to parameters, buffers and arguments", "to output 0", "to output 2"]
    before.restore()
    outputs = [leaf for leaf in model(x) if isinstance(leaf, torch.Tensor)]
    weight, versions = model.linear.weight.detach().clone(), [x._version, model.linear.weight._version]
    found["through .data to parameters, buffers and arguments"](outputs)
    assert torch.equal(model.linear.weight, weight * 1.25) and torch.equal(x, X * 1.25) and model.total == 2
    assert versions == [x._version, model.linear.weight._version]
    known = outputs[0].detach().clone()
    found["to output 0"](outputs)
    assert torch.equal(outputs[0], known * 1.25)


def test_nothing_is_written_where_there_are_no_gradients_or_calls_stay_in_a_history(monkeypatch):
    model = Several()
    with torch.no_grad():
        before = BeforeCall(model, (X,), {})
        assert not list(writes_between(before, Sides(before, True).expected))
    before = BeforeCall(model, ((X.clone().requires_grad_() * 2)[1:],), {})
    assert not list(writes_between(before, Sides(before, True).expected))
    before = BeforeCall(model, (X,), {})
    expected = Sides(before, True).expected
    assert list(writes_between(before, expected))
    monkeypatch.setattr("memopt.calls.between.has_group", lambda: True)
    assert not list(writes_between(before, expected))
