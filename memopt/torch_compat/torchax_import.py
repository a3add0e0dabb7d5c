"""What the import of torchax would do to torch, kept from it; tried on torch 2.13."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from memopt.torch_compat.patched import replaced


@contextlib.contextmanager
def without_renaming() -> Iterator[None]:
    """Within: torch's spare device keeps its name, and no module is entered for it, whoever asks.

    Torchax renames it as it is imported, no setting prevents that, and torch has no way back.
    """
    with (
        replaced(torch.utils, "rename_privateuse1_backend", lambda name: None),
        replaced(torch, "_register_device_module", lambda name, module: None),
    ):
        yield
