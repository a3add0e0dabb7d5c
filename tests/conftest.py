"""One thread and one seed: results must not depend on the machine's core count or on the order of tests."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _deterministic() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
