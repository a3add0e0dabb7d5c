"""How fast values go from a CUDA device to the host's pinned memory, and back."""

from __future__ import annotations

import torch

from memopt.torch_compat.fake_tensors import no_fake_mode

# What is copied: so much that what a copy costs before it does anything is nothing.
LINK_BYTES = 2**26
_REPEATS = 3


def measure_link(device: torch.device) -> tuple[float, float]:
    """Copy a buffer there and back, and return the bytes per second of both ways: the most of a few copies each.

    Raises:
        RuntimeError: memory is short, on the device or on the host.
    """
    with no_fake_mode(), torch.no_grad(), torch.cuda.device(device):
        here = torch.zeros(LINK_BYTES, dtype=torch.uint8, device=device)
        host = torch.zeros(LINK_BYTES, dtype=torch.uint8).pin_memory()
        rates = _rate(host, here), _rate(here, host)
        del here
        torch.cuda.empty_cache()
    return rates


def _rate(into: torch.Tensor, of: torch.Tensor) -> float:
    taken = []
    for _ in range(_REPEATS + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        into.copy_(of, non_blocking=True)
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) / 1000)
    return float(of.nbytes / min(taken[1:]))  # the first one finds nothing ready
