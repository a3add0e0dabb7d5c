"""The link between a device and the host: figures, what is measured, and what is read back."""

import pytest
import torch

from memopt.memory.cost import table as costs
from memopt.memory.cost.devices import CPU, find, typical
from memopt.memory.cost.link import measure_link
from memopt.memory.cost.table import CostTable

CUDA = torch.device("cuda", 0)


def test_a_device_that_is_not_here_has_its_figures():
    assert CostTable(target=find("h100")).link(CUDA) == (54e9, 54e9)
    assert find("a100").link == (24e9, 24e9) and find("t4").link == (12e9, 12e9)


def test_a_cpu_has_none():
    assert CostTable().link(torch.device("cpu")) == (0.0, 0.0) == CPU.link


@pytest.fixture
def here(monkeypatch):
    """A CUDA device in this machine, with room."""
    monkeypatch.setattr(costs, "_is_here", lambda device: True)
    monkeypatch.setattr(CostTable, "_place", lambda self, device: f"{device} for links")
    monkeypatch.setattr(CostTable, "_limit", lambda self, device: 2**30)
    measured = []

    def measure(device):
        measured.append(device)
        return 5e10, 4e10

    monkeypatch.setattr(costs, "measure_link", measure)
    return measured


def test_it_is_measured_once(here):
    table = CostTable()
    assert table.link(CUDA) == table.link(CUDA) == CostTable().link(CUDA) == (5e10, 4e10)
    assert here == [CUDA], "another table finds it on disk"


def test_where_memory_is_short_figures_serve(here, monkeypatch):
    monkeypatch.setattr(CostTable, "_place", lambda self, device: "another place")
    monkeypatch.setattr(CostTable, "_limit", lambda self, device: 0)
    assert CostTable().link(CUDA) == typical("cuda").link and here == []
    monkeypatch.setattr(CostTable, "_limit", lambda self, device: 2**30)

    def fail(device):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(costs, "measure_link", fail)
    assert CostTable().link(CUDA) == typical("cuda").link


def test_what_is_damaged_is_not_read(here, monkeypatch):
    monkeypatch.setattr(CostTable, "_place", lambda self, device: "a third place")
    CostTable()._store.put("a third place", "link", {"to_host": 5e10, "from_host": -1.0})
    assert CostTable().link(CUDA) == (5e10, 4e10) and here == [CUDA]


@pytest.mark.gpu
def test_on_a_gpu_it_is_some_gigabytes_per_second():
    rates = measure_link(torch.device("cuda", torch.cuda.current_device()))
    assert all(2e9 < rate < 1e12 for rate in rates)
