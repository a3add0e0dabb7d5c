from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memopt.torch_compat import dispatch
from memopt.torch_compat.fake_tensors import FakeTensor, FakeTensorMode, has_symbols, is_dense, no_fake_mode


class Noted(dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Function(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_modes_see_nothing_within_and_all_after() -> None:
    with Noted() as mode:
        with dispatch.no_modes():
            torch.ones(2).add(1)
        assert mode.seen == []
        torch.ones(2).add(1)
    assert torch.ops.aten.add.Tensor in mode.seen


def test_tensors_are_real_within_and_fake_after() -> None:
    for real in (dispatch.no_modes, no_fake_mode):
        with FakeTensorMode():
            with real():
                assert float(torch.ones(2).sum()) == 2
            assert isinstance(torch.ones(2), FakeTensor)
    with no_fake_mode():  # where none is in force, too
        assert float(torch.ones(2).sum()) == 2


def test_autocast_is_off_within_and_on_after() -> None:
    x = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with dispatch.no_autocast():
            assert (x @ x).dtype is torch.float32
        assert (x @ x).dtype is torch.bfloat16


def test_function_modes_are_counted() -> None:
    before = dispatch.function_modes()
    with Function(), Function():
        assert dispatch.function_modes() == before + 2
    assert dispatch.function_modes() == before


def test_kernels_by_device() -> None:
    assert dispatch.has_kernel("aten::mm", "CPU") and not dispatch.has_kernel("aten::mm", "MPS")


def test_layouts_of_fakes() -> None:
    x = torch.ones(4, 6)
    assert is_dense(x.t()) and not is_dense(x[:, ::2]) and not has_symbols(x)
