"""Outputs in a CUDA graph's memory: where they are gone, nothing is free for the rest of the loop."""

from __future__ import annotations

import torch

from memopt.step.open_window import Ended, OpenWindow
from memopt.torch_compat.cuda_memory import holds_its_memory, storage_of_memory


def test_outputs_that_are_lent_leave_nothing() -> None:
    there = torch.ones(64)
    aliased = storage_of_memory(there.data_ptr(), there.device, there.nbytes)
    assert holds_its_memory(there.untyped_storage()) and not holds_its_memory(aliased)
    call = Ended("key", torch.device("cpu"), 0, lambda: 0)
    opened = OpenWindow(None, call, [], [aliased, there.untyped_storage()], lambda: None, 0)  # type: ignore[arg-type]
    assert [size for _, size in opened.made] == [there.nbytes]
