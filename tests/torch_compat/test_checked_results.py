"""A factorization that eager refuses is refused by a compiled model as well."""

import pytest
import torch
from torch import nn

import memopt
from memopt.entry import torch_compile_backend

CALLS = {
    "cholesky": torch.linalg.cholesky,
    "inv": torch.linalg.inv,
    "solve": lambda x: torch.linalg.solve(x, torch.ones(4)),
}


class Factor(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.scale, self.call = nn.Parameter(torch.ones(4)), call

    def forward(self, x):
        return self.call(x * self.scale)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("entry", ["memopt.compile", "torch.compile"])
@pytest.mark.parametrize("call", CALLS)
def test_what_eager_refuses_is_refused(call, entry, gradients):
    torch._dynamo.reset()
    model = Factor(CALLS[call])
    run = memopt.compile(model, backend="aten")
    if entry == "torch.compile":
        run = torch.compile(model, backend=torch_compile_backend, options={"backend": "aten"})
    with torch.set_grad_enabled(gradients):
        torch.testing.assert_close(run(2 * torch.eye(4)), model(2 * torch.eye(4)))
        wrong = -torch.ones(4, 4)
        with pytest.raises(RuntimeError) as expected:
            model(wrong)
        with pytest.raises(RuntimeError) as found:
            run(wrong)
    assert str(found.value) == str(expected.value)
