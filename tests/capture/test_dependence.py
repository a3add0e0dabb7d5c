from __future__ import annotations

import torch

from memopt.capture.dependence import gradient_sources
from tests.passes.build import capture_joint


def _heads(x, body, first, second, third):
    h = torch.relu(x @ body)
    return h @ first, h.detach().sum(), h @ second, torch.round(third)


def test_each_gradient_goes_by_the_outputs_that_it_comes_of() -> None:
    sizes = (5, 4), (4, 4), (4, 2), (4, 3), (3,)
    tensors = [torch.randn(size, requires_grad=place > 0) for place, size in enumerate(sizes)]
    program = capture_joint(_heads, *tensors)
    gradients = zip(program.outputs[program.forward_outputs :], gradient_sources(program), strict=True)
    found = [sources for output, sources in gradients if output.target is not None]
    # The input has no gradient. Rounding has one of zeros, for which nothing is read.
    assert [item for item in found if item is not None] == [(0, 2), (0,), (2,), (3,)]
