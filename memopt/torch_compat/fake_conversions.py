"""Conversions of a module's tensors (`to`, `half`) while it runs on fake ones: in place, as those of real ones are.

Torch swaps fake parameters, whole objects, even where nothing changes, and refuses where anyone else knows of them.
Tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from memopt.torch_compat.patched import replaced
from memopt.torch_compat.valued_fakes import ValuedFakeMode


def converted_as_real() -> contextlib.AbstractContextManager[None]:
    """Within: a parameter of a `ValuedFakeMode` that is converted stays the object that it is, and takes the data."""
    # Torch's own setting chooses swapping for tensors that would be set in place, and not the other way.
    return replaced(torch.utils, "swap_tensors", _takes_data(torch.utils.swap_tensors))


def _takes_data(swap: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def swap_tensors(kept: Any, converted: Any) -> None:
        modes = {getattr(tensor, "fake_mode", None) for tensor in (kept, converted)}
        mode = modes.pop()
        if isinstance(mode, ValuedFakeMode) and not modes:
            mode.set_data(kept, converted)
        else:
            swap(kept, converted)

    return swap_tensors
