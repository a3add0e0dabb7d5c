"""What fake tensors say of the gradients of losses is how real ones lie, and a loss of a transposed tensor trains."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memopt
from memopt.torch_compat.fake_tensors import FakeTensorMode
from memopt.torch_compat.gradients_of_losses import WITHOUT_GAPS

X = torch.randn(6, 4, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("operator", WITHOUT_GAPS, ids=str)
def test_they_lie_on_fakes_as_they_do(operator):
    given = (
        X.sum(),
        X.permute(2, 1, 0),
        torch.zeros(4, 4, 6),
        1,
        *([1.0] if len(operator._schema.arguments) > 4 else []),
    )
    mode = FakeTensorMode()
    with mode:
        fake = operator(*(mode.from_tensor(each) if isinstance(each, torch.Tensor) else each for each in given))
    real = operator(*given)
    assert fake.stride() == real.stride() and fake.shape == real.shape and fake.dtype == real.dtype
    assert fake.device == real.device


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss])
def test_a_loss_of_what_is_transposed_trains(loss, dynamic):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.Linear(4, 6)

        def forward(self, x):
            out = self.inner(x).transpose(1, 2)
            return loss(out, torch.ones_like(out))

    model, twin = Model(), Model()
    memopt.compile(model, backend="aten", dynamic=dynamic)(X).backward()
    twin(X).backward()
    assert torch.equal(model.inner.weight.grad, twin.inner.weight.grad)
