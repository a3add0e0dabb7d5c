"""What of torch's settings chooses kernels and types of new tensors, beside autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def kernel_settings() -> tuple[Any, ...]:
    """The settings now."""
    kernels = torch.backends.cuda
    return (
        torch.get_default_dtype(),
        kernels.flash_sdp_enabled(),  # type: ignore[no-untyped-call]
        kernels.mem_efficient_sdp_enabled(),  # type: ignore[no-untyped-call]
        kernels.math_sdp_enabled(),  # type: ignore[no-untyped-call]
        kernels.cudnn_sdp_enabled(),  # type: ignore[no-untyped-call]
    )


def set_kernel_settings(wanted: tuple[Any, ...]) -> None:
    """Set what differs from those that `kernel_settings` gave."""
    kernels = torch.backends.cuda
    setters: tuple[Callable[[Any], Any], ...] = (
        torch.set_default_dtype,
        kernels.enable_flash_sdp,
        kernels.enable_mem_efficient_sdp,
        kernels.enable_math_sdp,
        kernels.enable_cudnn_sdp,
    )
    for change, present, value in zip(setters, kernel_settings(), wanted, strict=True):
        if present != value:
            change(value)
