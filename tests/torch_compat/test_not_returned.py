"""Stand-ins for outputs that are not made."""

import pytest
import torch

from memopt.torch_compat.not_returned import NotReturned


@pytest.mark.parametrize("like", [torch.ones(3, 4).t(), torch.ones((), dtype=torch.float64), torch.ones(2, 0)])
def test_a_stand_in_lies_as_the_output_would_and_takes_nothing(like):
    stand = NotReturned.like(like)
    assert isinstance(stand, torch.Tensor) and stand.is_meta
    assert (stand.shape, stand.stride(), stand.dtype) == (like.shape, like.stride(), like.dtype)
    assert stand.float().dtype == torch.float32, "libraries change the precision of all that a model returns"


def test_no_number_can_be_read_from_it():
    stand = NotReturned.like(torch.ones(4))
    for read in (lambda: stand.sum().item(), lambda: stand.tolist(), lambda: stand + torch.ones(4)):
        with pytest.raises((RuntimeError, NotImplementedError)):
            read()
