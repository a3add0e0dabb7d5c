"""Bytes of storages that operators make, counted until each is released."""

import pytest
import torch

from memopt.cuda_graphs.aliases import storage_at, view
from memopt.memory.ledger import Ledger, apart, within_graph

CPU = torch.device("cpu")
KB = 256 * 4  # bytes of 256 float32


def test_storages_count_once_and_until_they_are_gone():
    given = torch.ones(256)
    with Ledger(CPU) as ledger:
        first = given + 1
        view = first.view(16, 16)
        second = view * 2
        assert ledger.live == ledger.peak == 2 * KB  # neither what was given nor a view of what is there
        del first
        assert ledger.live == 2 * KB  # the view holds it
        del view
        assert (ledger.live, ledger.peak) == (KB, 2 * KB)
        second.add_(1)
        assert ledger.live == KB
    third = second + 1  # nothing is seen any more
    assert ledger.live == KB and len(third) == 16
    del second, given
    assert ledger.live == 0 and not ledger.references


def test_what_shows_memory_of_a_cuda_graph_is_none_of_its_own():
    there = torch.ones(256)
    with Ledger(CPU) as ledger:
        shown = view(storage_at(there, {}), there)
        assert ledger.peak == 0
        made = shown + 1
        assert ledger.live == KB == made.nbytes


def test_fake_tensors_and_other_devices():
    with torch._subclasses.FakeTensorMode(), Ledger(torch.device("cuda", 0)) as ledger:
        here = torch.ones(256)
        there = torch.ones(1000, device="cuda")
        assert ledger.live == 4096 and len(here) < len(there)  # rounded up as the allocator rounds


def test_what_is_made_in_a_pause_is_remembered_and_not_counted():
    with Ledger(CPU) as ledger:
        kept = torch.ones(256)
        with within_graph(ledger):
            assert not ledger.counting
            made = torch.ones(512)
        used = made.add_(1)
        assert (ledger.live, ledger.beside, ledger.counting) == (KB, KB, True)
        del made, used
        assert ledger.live == KB and len(kept) == 256
        with pytest.raises(ValueError, match="in the pause"), ledger.pause():
            raise ValueError("in the pause")
        assert ledger.counting


def test_forward_or_backward_of_a_graph_is_left_out_of_a_rehearsal_alone():
    ledgers = [None]
    graph = apart(lambda args: [value + 1 for value in args], lambda: ledgers[0])
    assert float(graph([torch.zeros(())])[0]) == 1.0
    with Ledger(CPU) as ledgers[0]:
        (found,) = graph([torch.zeros(())])
        beside = found + 1
    assert float(beside) == 2.0
    assert ledgers[0].live == beside.untyped_storage().nbytes()
