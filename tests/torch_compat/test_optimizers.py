from __future__ import annotations

import pytest
from torch.optim import optimizer

from memopt.torch_compat.fake_tensors import FakeTensor
from memopt.torch_compat.optimizers import fakes_as_if_real


def test_fake_parameters_count_as_real_ones_within_and_not_after_an_error() -> None:
    known = optimizer._foreach_supported_types
    before = list(known)
    with pytest.raises(ValueError, match="within"), fakes_as_if_real():
        assert FakeTensor in known
        raise ValueError("within")
    assert known == before
