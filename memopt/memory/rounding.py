"""What an allocator takes for a request."""

from __future__ import annotations

import torch

# PyTorch's CUDA caching allocator gives out multiples of this (kMinBlockSize in c10/cuda/CUDACachingAllocator.cpp).
CUDA_BLOCK = 512


def allocated_bytes(size: int, device: torch.device) -> int:
    """Bytes that the device's allocator takes for a request of `size` bytes: whole blocks of 512 on CUDA."""
    return -(-size // CUDA_BLOCK) * CUDA_BLOCK if device.type == "cuda" else size
