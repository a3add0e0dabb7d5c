"""What cannot be a program is refused when it is captured, with the node's source line."""

import pytest
import torch

from memopt.capture.export import CaptureError, from_module


class _Apply(torch.nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


@pytest.mark.parametrize("function", [torch.nonzero, lambda x: x[x > 0].sum(), lambda x: x.repeat_interleave(x.long())])
def test_shapes_that_depend_on_data_are_refused(function) -> None:
    with pytest.raises(CaptureError, match=r"fixed shapes are needed: pad"):
        from_module(_Apply(function), [torch.ones(3)])


def test_sparse_tensors_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"only strided tensors are supported: leave to_sparse\(\) out"):
        from_module(_Apply(lambda x: x.to_sparse()), [torch.ones(3)])
