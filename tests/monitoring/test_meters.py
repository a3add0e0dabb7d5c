"""Bytes of a device: by CUDA's counts, which the monitors that are open share; here of an allocator of our own."""

import pytest
import torch

from memopt.monitoring.meters import CudaMeter, Most

DEVICE = torch.device("cuda", 0)


class Allocator:
    """Counts that go up as they are told, and their peaks since these were reset."""

    def __init__(self, monkeypatch):
        self.now = self.peak = 0
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", self.counts)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)

    def holds(self, *sizes):
        for size in sizes:
            self.now, self.peak = size, max(self.peak, size)

    def counts(self, device):
        return {
            "allocated_bytes": {"all": {"peak": self.peak}},
            "reserved_bytes": {"all": {"peak": self.peak + 100}},
        }

    def reset(self, device):
        self.peak = self.now


@pytest.fixture
def allocator(monkeypatch):
    return Allocator(monkeypatch)


def test_a_step_has_the_most_since_it_began(allocator):
    allocator.holds(50)
    meter = CudaMeter(DEVICE)
    allocator.holds(80, 20)
    assert meter.most() == Most(80, 180)
    meter.begin()
    allocator.holds(30)
    assert meter.most() == Most(30, 130)
    meter.close()


def test_a_step_that_begins_takes_no_peak_from_a_monitor_around_it(allocator):
    outer = CudaMeter(DEVICE)
    allocator.holds(90, 10)
    inner = CudaMeter(DEVICE)
    allocator.holds(40)
    assert outer.most() == Most(90, 190) and inner.most() == Most(40, 140)
    inner.close()
    inner.close()  # as after an error
    allocator.holds(95, 0)
    outer.begin()
    assert outer.most() == Most(0, 100) and inner.most().peak == 40
    outer.close()
