"""The storages that live tensors show: of every class of tensors, gradients, and what graphs have saved."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memopt
from memopt.cuda_graphs.aliases import storage_at, view
from memopt.memory.live_tensors import alive, live_blocks
from memopt.torch_compat.storages import id_of_storage

CPU = torch.device("cpu")


class Own(torch.Tensor):
    """A class of tensors that was not seen before."""


def storage(tensor):
    return id_of_storage(tensor.untyped_storage())


def test_tensors_of_every_class_are_seen_while_they_live():
    plain, weight, own = torch.ones(3), nn.Parameter(torch.ones(4)), torch.ones(5).as_subclass(Own)
    found = live_blocks(CPU)
    assert [found[storage(tensor)].nbytes for tensor in (plain, weight, own)] == [12, 16, 20]
    number = storage(plain)
    del plain
    assert number not in alive(found) and storage(weight) in alive(found)
    assert storage(weight) not in live_blocks(torch.device("meta"))


def test_what_shows_memory_of_a_cuda_graph_holds_none():
    there = torch.ones(8)
    known = live_blocks(CPU)
    shown = view(storage_at(there, {}), there)
    assert storage(shown) not in known and live_blocks(CPU).keys() <= known.keys()
    assert shown.sum() == 8


def test_gradients_and_what_is_saved_are_seen_though_python_does_not_hold_them():
    weight = nn.Parameter(torch.ones(7))
    weight.sum().backward()
    made = (weight * 2).exp()
    saved = made.grad_fn._saved_result
    numbers = storage(weight.grad), storage(saved)
    del saved
    result = made.sin()
    del made
    assert set(numbers) <= live_blocks(CPU).keys()
    del result


def forbidden_views():
    """Views that autograd refuses to name a node of, as their bases were written to."""
    split = torch.ones(4, requires_grad=True) * 2
    first = split.chunk(2)[0]
    split.add_(1)
    base = torch.ones(4, requires_grad=True) * 2
    with torch.no_grad():
        second = base[:2]
    base.mul_(2)
    for forbidden in (first, second):
        with pytest.raises(RuntimeError, match="modified inplace"):
            _ = forbidden.grad_fn
    return first, second


def test_views_that_autograd_forbids_are_found_like_others():
    views = forbidden_views()
    found = live_blocks(CPU)
    assert {id_of_storage(view.untyped_storage()) for view in views} <= set(found)


@pytest.mark.whole_process
def test_a_step_within_bytes_is_planned_beside_such_views():
    kept = forbidden_views()
    model = nn.Linear(8, 8)
    run = memopt.compile(model, "1GB", backend="aten", verify=False)
    run(torch.ones(4, 8)).sum().backward()
    assert run.report.programs and len(kept) == 2


def test_what_a_graph_has_made_or_saved_of_its_data_is_told_apart_however_often_it_was_looked_at():
    given, weight = torch.ones(2), nn.Parameter(torch.ones(2))
    made = ((given * weight).exp() * 2).sin()
    for _ in range(2):  # to look at what is saved gives Python tensors of it
        blocks = live_blocks(CPU)
        saved = made.grad_fn.next_functions[0][0].next_functions[0][0]._saved_result
        assert [blocks[storage(each)].of_graph for each in (given, weight, made, saved)] == [True, False, True, True]


def test_what_holds_no_memory_counts_nothing():
    """A traced function of the user's own leaves such tensors: they counted as the loop's, which was refused then."""
    wrapped = torch._to_functional_tensor(torch.ones(1000))
    kept = torch.ones(7)
    found = live_blocks(CPU)
    assert storage(wrapped) not in found and found[storage(kept)].nbytes == 28
