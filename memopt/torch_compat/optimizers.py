"""What torch's optimizers go by when they choose an implementation; tried on torch 2.11 and 2.13."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer


@contextlib.contextmanager
def fakes_as_if_real() -> Iterator[None]:
    """Within: optimizers that choose by the parameters' type choose for fake parameters as for real ones."""
    types: list[Any] = optimizer._foreach_supported_types
    types.append(FakeTensor)
    try:
        yield
    finally:
        types.remove(FakeTensor)
