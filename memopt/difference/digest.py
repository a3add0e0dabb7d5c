"""Short digests of tensors, by which equal values are known."""

from __future__ import annotations

import hashlib

import torch


def tensor_digest(tensor: torch.Tensor) -> str:
    """Ten hexadecimal digits of the tensor's dtype, shape and values, whatever its device and strides."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return bytes_digest(f"{plain.dtype}{list(plain.shape)}", plain.reshape(-1).view(torch.uint8).numpy().data)


def bytes_digest(kind: str, content: memoryview | bytes) -> str:
    """Ten hexadecimal digits of a type in words and of its bytes."""
    found = hashlib.sha256(kind.encode())
    found.update(content)
    return found.hexdigest()[:10]
