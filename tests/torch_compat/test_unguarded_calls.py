"""A process that cannot ask CUDA runs methods of fake tensors of a GPU all the same, with the results they had."""

import os
import traceback

import pytest
import torch
from torch._subclasses import FakeTensorMode, fake_tensor

from memopt.torch_compat.forked import stand_alone
from memopt.torch_compat.unguarded_calls import call_operators_alone
from tests.forks import fork


def in_a_copy(work):
    """Do it in a copy of this process, whose state is lost; whether it came to its end."""
    child = fork()
    if not child:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


KEYS = [
    0, -1, slice(1, 3), ..., None, (slice(None), 2), (..., slice(None, 5)), (None, 1, ..., None),
    (..., -1, slice(1, 8, 3)),
    torch.tensor([2, 0]), (slice(1, None), torch.tensor([0, 2])), (torch.tensor([1, 0]), ..., torch.tensor([3, 1])),
    (2, None, torch.tensor([[1], [0]])),
]  # fmt: skip


def test_parts_are_those_that_torch_takes():
    x = torch.arange(4 * 3 * 8).reshape(4, 3, 8).float()
    expected = [x[key] for key in KEYS]
    written = []
    for key in KEYS:
        other = x.clone()
        other[key] = -1.5
        written.append(other)

    def work():
        call_operators_alone()
        for key, part, whole in zip(KEYS, expected, written, strict=True):
            assert torch.equal(x[key], part), key
            other = x.clone()
            other[key] = -1.5
            assert torch.equal(other, whole), key
            other[key] = torch.full_like(part, 7).half()
            assert bool((other[key] == 7).all())
        assert torch.equal(x.nonzero(), torch.ops.aten.nonzero(x))
        assert torch.equal(torch.empty(4, 3, 8).copy_(x[:, :1]), x[:, :1].expand(4, 3, 8))
        for key in (True, x > 0, [0, 1], 1.0):
            with pytest.raises(NotImplementedError):
                x[key]

    assert in_a_copy(work)


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="a build with CUDA answers here where a copy could not")
def test_fake_tensors_of_a_gpu_need_none():
    def work():
        fake_tensor.init_gpu_context = lambda *_: None
        with FakeTensorMode():
            a, b = (torch.empty_strided((4, 8), (8, 1), device="cuda:0") for _ in range(2))
            with pytest.raises(RuntimeError, match="cuda"):
                a.copy_(b)
            stand_alone({0: None})
            a.copy_(b)
            assert a[0].shape == (8,) and a[:, 1:3].stride() == (8, 1)
            a[1:, :2] = b[:3, 2:4]

    assert in_a_copy(work)
