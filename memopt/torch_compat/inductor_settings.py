"""What Inductor is set to, and where it keeps its files; tried on torch 2.11 and 2.13."""

from __future__ import annotations

from torch._inductor import config


def may_multiply_convolutions() -> bool:
    """Whether Inductor may run a convolution as a product of matrices."""
    return bool(config.conv_1x1_as_mm or config.max_autotune or config.max_autotune_gemm)
