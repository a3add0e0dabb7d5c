"""What is written to through a view stays laid out as in the model, and so do the views and outputs made of it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memopt


def masked(y):
    y.t().masked_fill_(y.t() > 0.5, 0.2)
    return y, y[:, :1]


def viewed(y):
    z = y.t().sin()
    z.unsqueeze(0).masked_fill_(z.unsqueeze(0) > 0.5, 0.2)
    return z, z.t().view(-1), torch.as_strided(z, (2, 3), (1, 2))


def item(y):
    z = y.t() * 2
    z[z > 0.3] = 0.1
    return z


def by_operator(y):
    z = y.t().cos()
    torch.ops.aten.masked_fill_.Scalar(z, z > 0.5, 3.0)
    return (z,)


def without_gradients(y):
    with torch.no_grad():
        y.t().masked_fill_(y.t() > 0.5, 0.2)
    return y


def other_operand(y):
    z = y.permute(1, 0).cos()
    z.mul_(torch.ones(4, 6))
    F.hardtanh(z, inplace=True)
    return z, z.reshape(-1)


def one_window(y):
    z = y.t().unsqueeze(1).sin()
    z.unfold(1, 1, 3).sub_(0.5)
    return z


def tiles(y):
    z = y.t().cos()
    z.unfold(-1, 2, 2)[..., 0].mul_(2)
    torch.ops.aten.unfold.default(z, 0, 2, 2).add_(1)
    return z, z.t()


WRITES = {
    write.__name__: write
    for write in (one_window, tiles, masked, viewed, item, by_operator, without_gradients, other_operand)
}  # fmt: skip


class Model(nn.Module):
    def __init__(self, write):
        super().__init__()
        torch.manual_seed(0)
        self.write, self.linear = write, nn.Linear(4, 4)

    def forward(self, x):
        return self.write(self.linear(x) * 1)


@pytest.mark.quick("*-aten-None-True", "*-aten-1.0-False", "*-static-*")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("backend", "budget"), [("aten", None), ("aten", 1.0), ("static", None)])
@pytest.mark.parametrize("name", WRITES)
def test_strides_and_numbers_are_the_model_s(name, backend, budget, training):
    if backend == "static" and training:
        return  # for inference alone
    torch._dynamo.reset()
    model, x = Model(WRITES[name]), torch.linspace(-1, 1, 24).reshape(6, 4).sin()
    with torch.set_grad_enabled(training):
        call = memopt.compile(model, budget if training else None, backend=backend, verify=True)
        for _ in range(2):
            found, expected = call(x), model(x)
            found, expected = (out if isinstance(out, tuple) else (out,) for out in (found, expected))
            torch.testing.assert_close(found, expected)
            assert [value.stride() for value in found] == [value.stride() for value in expected]
            storages = [[one.data_ptr() == out[0].data_ptr() for one in out] for out in (found, expected)]
            assert storages[0] == storages[1]
            if training:
                loss = [sum(value.square().sum() for value in out) for out in (found, expected)]
                torch.testing.assert_close(*(torch.autograd.grad(one, [*model.parameters()]) for one in loss))
