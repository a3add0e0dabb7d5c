"""Every storage once, with what made it, for as long as it is there."""

import pytest
import torch
from torch import nn

from memopt.monitoring import tracker as module
from memopt.monitoring.modules import ModuleWatch
from memopt.monitoring.tracker import Tracker
from memopt.torch_compat.fake_tensors import FakeTensorMode


def tracker(called=lambda *_: None, short=lambda _: None):
    return Tracker(torch.device("cpu"), ModuleWatch(called), short)


def test_a_storage_counts_once_and_goes():
    with tracker() as found:
        x = torch.zeros(100)
        views = [x[10:], x.view(10, 10), x.detach()]
        assert found.live == 400 and len(found.made) == 1
        y = x + 1
        assert found.live == found.peak == 800
        del x, views
        assert found.live == 400
        del y
        assert found.live == 0 and found.made == {} and found.peak == 800


def test_what_is_read_and_was_never_made_is_unseen():
    outside = torch.zeros(8)
    with tracker() as found:
        outside.add_(1)
        (made,) = found.made.values()
        assert made.origin.phase == "unseen" and made.nbytes == 32


def test_origins():
    model = nn.Sequential(nn.Linear(4, 3))
    with tracker() as found:
        out = model(torch.ones(2, 4))
        made = {m.origin.operator: m for m in found.made.values() if m.origin.operator}
        ones, product = made[torch.ops.aten.ones.default], made[torch.ops.aten.addmm.default]
        assert ones.origin.phase == "loop" and ones.origin.module == ""
        assert product.origin.phase == "forward" and product.within == ("Sequential", "0")
        assert product.origin.shape == (2, 3) and product.origin.place[0] == __file__
        out.sum().backward()
        gradients = [m for m in found.made.values() if m.origin.phase == "backward"]
        assert sorted(m.origin.shape for m in gradients) == [(1, 3), (3, 4)]  # the bias' is summed over rows


def test_what_was_there_at_the_peak():
    with tracker() as found:
        a = torch.zeros(10)
        b = torch.zeros(20)
        del a
        c = torch.zeros(5)
        assert sorted(m.nbytes for m in found.at_peak()) == [40, 80]
        found.next_step()
        assert found.peak == 100 and sorted(m.nbytes for m in found.at_peak()) == [20, 80]
        del b
        torch.zeros(100)
        assert sorted(m.nbytes for m in found.at_peak()) == [20, 400]
        del c


def test_an_endless_step_is_not_remembered_whole(monkeypatch):
    monkeypatch.setattr(module, "_MANY", 10)
    with tracker() as found:
        x = torch.zeros(100)
        del x
        for _ in range(95):
            torch.zeros(1)
        assert len(found.gone) < 20 and [m.nbytes for m in found.at_peak()] == [400]


def test_fake_tensors_and_other_devices_take_nothing():
    with tracker() as found:
        with FakeTensorMode():
            torch.zeros(100)
        torch.zeros(100, device="meta")
        assert found.live == 0 and found.peak == 0


def test_an_error_of_too_little_memory_is_told_at_the_operator():
    seen = []
    with pytest.raises(torch.OutOfMemoryError), tracker(short=seen.append):
        torch.ops.memopt_tests_short.none()
    assert len(seen) == 1


@torch.library.custom_op("memopt_tests_short::none", mutates_args=())
def none() -> torch.Tensor:
    """Runs out of memory."""
    raise torch.OutOfMemoryError("none")
