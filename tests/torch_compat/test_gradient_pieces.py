"""Which gradients lie in one piece: known from the backward before, and only where a free block has room for them."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from memopt.torch_compat.gradient_pieces import GradientPieces, with_own_storage


class Backward:
    """Backwards of groups whose gradients have these bytes, beside so much that is free."""

    def __init__(self, pieces, free):
        self.pieces, self.free, self.looks, self.made, self.task = pieces, free, 0, [], 0

    def largest(self):
        self.looks += 1
        return self.free

    def run(self, sizes, beside=0, fails=False):
        def allocate(nbytes):
            self.made.append(nbytes)
            self.kept = torch.zeros(nbytes, dtype=torch.uint8)
            return self.kept

        self.made, self.looks, self.task = [], 0, self.task + 1
        assert self.pieces.begins(self.task) and not self.pieces.begins(self.task)
        found = [self.pieces.take(size, beside, self.largest, allocate) for size in sizes]
        self.kept = None
        if not fails:
            self.pieces.ends()
        return found


def test_the_first_backward_only_tells_what_comes_and_the_next_has_it_in_one_piece():
    backward = Backward(GradientPieces(), 5000)
    assert backward.run([1000, 600, 2048, 8192]) == [None] * 4 and backward.looks == 0
    *parts, last = backward.run([1000, 600, 2048, 8192])
    assert backward.made == [1024 + 1024 + 2048] and last is None, "the last one does not fit"
    assert [part.nbytes for part in parts] == [1000, 600, 2048]
    assert [part.storage_offset() for part in parts] == [0, 1024, 2048]


def test_where_less_is_free_than_what_runs_beside_needs_each_lies_by_itself():
    backward = Backward(GradientPieces(), 5000)
    backward.run([1024] * 4)
    assert backward.run([1024] * 4, beside=4000) == [None] * 4
    assert [part is not None for part in backward.run([1024] * 4, beside=2000)] == [True, True, True, True]
    assert backward.made == [2048, 2048], "as many as fit, and then as many again"


def test_what_is_free_is_looked_at_in_few_backwards_and_what_was_found_stays():
    backward = Backward(GradientPieces(), 3000)
    for _ in range(4):
        backward.run([1024] * 3)
    assert backward.looks
    backward.free = 0
    parts = backward.run([1024] * 3)
    assert backward.looks == 0 and [part is not None for part in parts] == [True, True, False]


def test_a_backward_of_other_groups_has_no_piece_from_where_it_differs():
    backward = Backward(GradientPieces(), 10_000)
    backward.run([1024] * 3)
    assert backward.run([512, 1024, 1024]) == [None] * 3
    found = backward.run([512, 1024])  # one is not reduced this time: the piece has room for it
    assert all(part is not None for part in found) and backward.made == [512 + 1024 + 1024]
    assert [part is not None for part in backward.run([512, 1024])] == [True, True]


def test_a_backward_that_failed_keeps_no_piece_and_the_next_one_begins_anew():
    backward = Backward(GradientPieces(), 10_000)
    backward.run([1024] * 3)
    (part,) = backward.run([1024], fails=True)
    memory = weakref.ref(part)
    del part
    assert memory() is None and backward.pieces._piece() is None
    assert [part is not None for part in backward.run([1024] * 3)] == [True] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_begins_its_own_storage_and_keeps_the_piece(dtype):
    piece = torch.zeros(4096, dtype=torch.uint8)
    part = with_own_storage(piece[1024:2048], dtype)
    assert part.storage_offset() == 0 and part.untyped_storage().nbytes() == 1024
    assert torch.as_strided(part, (4,), (1,), 2).data_ptr() == piece.data_ptr() + 1024 + 2 * dtype.itemsize
    part.fill_(1.0)
    assert piece[1024:2048].any() and not piece[:1024].any() and not piece[2048:].any()
    expected = part.clone()
    del piece
    gc.collect()
    torch.ones(4096, dtype=torch.uint8)
    assert torch.equal(part, expected)
