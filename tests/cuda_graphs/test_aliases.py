"""Outputs that alias memory: seen while they are held, copied where that is needed, kept where it cannot be."""

from __future__ import annotations

import gc
import weakref

import torch

from memopt.cuda_graphs.aliases import AliasedOutputs


class Memory:
    """What holds the memory of the outputs."""


def aliased():
    values = [torch.arange(6.0).reshape(2, 3).t(), None, torch.ones(4, dtype=torch.float64)]
    outputs = AliasedOutputs()
    return values, outputs, outputs.alias(values)


def test_what_is_lent_lies_where_the_values_do():
    values, outputs, (first, nothing, last) = aliased()
    assert nothing is None and first.stride() == (1, 3) and last.dtype == torch.float64
    values[0][2, 1] = 9.0
    assert first[2, 1] == 9.0 and outputs.held() == {values[0].data_ptr(), values[2].data_ptr()}


def test_what_was_let_go_of_needs_nothing():
    _, outputs, made = aliased()
    del made
    assert not outputs.held() and outputs.copy_out(tuple)


def test_tensors_that_are_held_get_memory_of_their_own():
    values, outputs, (first, _, last) = aliased()
    other = last.detach()  # as an accumulated gradient is
    del last
    assert outputs.copy_out(lambda: [other])
    values[0].zero_()
    values[2].zero_()
    assert first[2, 1] == 5.0 and other.sum() == 4 and first.stride() == (1, 3)


def test_memory_of_what_is_held_unseen_is_kept_as_long():
    memory = Memory()
    gone, values = weakref.ref(memory), [torch.arange(3.0)]
    outputs = AliasedOutputs(memory)
    del memory
    unseen = outputs.alias(values)[0][1:]
    assert not outputs.copy_out(tuple)
    del outputs
    assert gone() is not None and unseen[0] == 1.0
    del unseen
    AliasedOutputs().alias([])
    assert gone() is None


def test_a_loan_that_is_let_go_of_with_its_owner_is_kept_as_long_as_what_is_held():
    """As where code is forgotten that nobody asked to give its memory back."""
    memory = Memory()
    gone, values = weakref.ref(memory), [torch.arange(3.0), torch.ones(2)]
    owner = [AliasedOutputs(memory)]
    owner.append(owner)  # found by a later look for garbage
    held, other = owner[0].alias(values)
    del memory, other, owner
    gc.collect()
    assert gone() is not None and held[2] == 2.0
    del held
    AliasedOutputs().alias([])
    assert gone() is None


def test_of_a_loan_that_nothing_is_held_of_nothing_is_kept():
    memory = Memory()
    gone = weakref.ref(memory)
    outputs = AliasedOutputs(memory)
    outputs.alias([torch.arange(3.0)])
    del memory, outputs
    assert gone() is None
