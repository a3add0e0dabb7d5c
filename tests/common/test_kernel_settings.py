"""Torch's settings that choose kernels, read and set."""

import torch

from memopt.common.kernel_settings import kernel_settings, set_kernel_settings


def test_what_was_read_is_set_again():
    before = kernel_settings()
    try:
        torch.backends.cuda.enable_flash_sdp(not before[1])
        torch.set_default_dtype(torch.float64)
        assert kernel_settings()[:2] == (torch.float64, not before[1])
    finally:
        set_kernel_settings(before)
    assert kernel_settings() == before
