"""Views of one memory: whether they show the same elements, beside a search through all of them."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from memopt.capture.overlap import same_elements, share_elements


def _places(view: torch.Tensor) -> set[int]:
    indices = itertools.product(*map(range, view.shape))
    starts = (view.storage_offset() + sum(map(int.__mul__, index, view.stride())) for index in indices)
    size = view.element_size()
    return {start * size + byte for start in starts for byte in range(size)}


@pytest.mark.parametrize("seed", range(200))
def test_as_a_search_through_all_elements_finds(seed: int) -> None:
    draw = random.Random(seed)
    memory = torch.zeros(400)
    views = []
    for _ in range(2):
        shape = [draw.randint(0 if draw.random() < 0.05 else 1, 4) for _ in range(draw.randint(0, 4))]
        strides = [draw.randint(0, 20) for _ in shape]
        other = memory.view(torch.float64 if draw.random() < 0.2 else torch.float32)
        views.append(other.as_strided(shape, strides, draw.randint(0, 40)))
    assert share_elements(*views) == bool(_places(views[0]) & _places(views[1]))


def test_large_views_are_looked_at_by_their_strides() -> None:
    x = torch.empty(4096, 8192, device="meta")
    assert not share_elements(x[:, ::2], x[:, 1::2])
    assert not share_elements(x[:, :4096], x[:, 4096:])
    assert share_elements(x[:, 1:], x[:, :-1])
    assert share_elements(x.t()[3], x[5])


def test_other_memory_and_the_same_elements() -> None:
    x = torch.zeros(4, 6)
    assert not share_elements(x, torch.zeros(4, 6))
    assert same_elements(x[1:], x[1:].view(3, 6))
    assert not same_elements(x[1:], x[:3])
    assert not same_elements(x.view(6, 4).t(), x)
