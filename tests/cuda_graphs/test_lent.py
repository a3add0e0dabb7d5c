"""Tensors that are lent: seen while they are held, copied where that is needed, kept where it cannot be."""

from __future__ import annotations

import gc
import weakref

import torch

from memopt.cuda_graphs.lent import Loan


class Memory:
    """What holds the values that are lent."""


def lend():
    values = [torch.arange(6.0).reshape(2, 3).t(), None, torch.ones(4, dtype=torch.float64)]
    loan = Loan()
    return values, loan, loan.lend(values)


def test_what_is_lent_lies_where_the_values_do():
    values, loan, (first, nothing, last) = lend()
    assert nothing is None and first.stride() == (1, 3) and last.dtype == torch.float64
    values[0][2, 1] = 9.0
    assert first[2, 1] == 9.0 and loan.held() == {values[0].data_ptr(), values[2].data_ptr()}


def test_what_was_let_go_of_needs_nothing():
    _, loan, made = lend()
    del made
    assert not loan.held() and loan.settle(tuple)


def test_tensors_that_are_held_get_memory_of_their_own():
    values, loan, (first, _, last) = lend()
    other = last.detach()  # as an accumulated gradient is
    del last
    assert loan.settle(lambda: [other])
    values[0].zero_()
    values[2].zero_()
    assert first[2, 1] == 5.0 and other.sum() == 4 and first.stride() == (1, 3)


def test_memory_of_what_is_held_unseen_is_kept_as_long():
    memory = Memory()
    gone, values = weakref.ref(memory), [torch.arange(3.0)]
    loan = Loan(memory)
    del memory
    unseen = loan.lend(values)[0][1:]
    assert not loan.settle(tuple)
    del loan
    assert gone() is not None and unseen[0] == 1.0
    del unseen
    Loan().lend([])
    assert gone() is None


def test_a_loan_that_is_let_go_of_with_its_owner_is_kept_as_long_as_what_is_held():
    """As where code is forgotten that nobody asked to give its memory back."""
    memory = Memory()
    gone, values = weakref.ref(memory), [torch.arange(3.0), torch.ones(2)]
    owner = [Loan(memory)]
    owner.append(owner)  # found by a later look for garbage
    held, other = owner[0].lend(values)
    del memory, other, owner
    gc.collect()
    assert gone() is not None and held[2] == 2.0
    del held
    Loan().lend([])
    assert gone() is None


def test_of_a_loan_that_nothing_is_held_of_nothing_is_kept():
    memory = Memory()
    gone = weakref.ref(memory)
    loan = Loan(memory)
    loan.lend([torch.arange(3.0)])
    del memory, loan
    assert gone() is None
