"""What a caller writes to an input after forward does not reach backward where autograd had saved a copy."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memopt
from tests.inductor.test_peak_lower_bound import needs_compiler


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, keep):
        ctx.save_for_backward(keep(x))
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0], None


COPIES = {
    "clone": torch.clone,
    "clones": lambda x: x.clone().clone(),
    "same type": lambda x: x.to(x.dtype, copy=True),
    "copied into": lambda x: torch.empty_like(x).copy_(x),
    "concatenation of one": lambda x: torch.cat([x]),
    "stack of one": lambda x: torch.stack([x])[0],
    "repeated once": lambda x: x.repeat(1),
    "padded by none": lambda x: F.pad(x, (0, 0)),
    "zeros added": lambda x: torch.zeros(6) + x,
    "times one": lambda x: x * 1,
    "of a view": lambda x: x.view(2, 3).clone().view(6),
    "view of it": lambda x: x.clone()[2:],
    "piece of it": lambda x: x.clone().split(4)[1] ** 3,
    "saved by a function": lambda x: Saves.apply(x, torch.clone),
    "computed by a function": lambda x: Saves.apply(x, torch.exp),
}


class Model(nn.Module):
    """Each input is read by one copy, which is written to or not."""

    def __init__(self, writes):
        super().__init__()
        self.writes = writes

    def forward(self, inputs):
        total = 0
        for copied, x in zip(COPIES.values(), inputs, strict=True):
            y = copied(x)
            y = y.sin_() if self.writes else y.sin()
            total = total + (y * 1.5).sum()
        return total


@needs_compiler
@pytest.mark.parametrize("backend", ["aten", "inductor"])
@pytest.mark.parametrize("writes", [True, False])
def test_inputs_may_be_written_to_after_forward_where_autograd_saved_copies(writes, backend):
    torch._dynamo.reset()
    model = Model(writes)
    run = memopt.compile(model, backend=backend, verify=False)
    gradients = []
    for call in (model, run):
        torch.manual_seed(0)
        inputs = [torch.randn(6, requires_grad=True) for _ in COPIES]
        loss = call(inputs)
        with torch.no_grad():
            for x in inputs:
                x.zero_()
        loss.backward()
        gradients.append(dict(zip(COPIES, [x.grad for x in inputs], strict=True)))
    torch.testing.assert_close(gradients[1], gradients[0])
