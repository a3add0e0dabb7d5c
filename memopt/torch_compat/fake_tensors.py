"""Tensors without values, and the modes that make them; tried on torch 2.11 and 2.13."""

from __future__ import annotations

import contextlib
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily


def no_fake_mode() -> contextlib.AbstractContextManager[Any]:
    """Within: what is made and called is real, though a mode of fake tensors may be in force around it."""
    return unset_fake_temporarily()
