from __future__ import annotations

import pytest
import torch

import memopt
from memopt.memory.fingerprint import fingerprint_of, same_fingerprint


def _same(value, write):
    before = fingerprint_of(value)
    write(value)
    return same_fingerprint(before, fingerprint_of(value))


VALUES = [
    lambda: torch.randn(300, 301),
    lambda: torch.randn(7),
    lambda: torch.randn(40, 50, 60).permute(2, 0, 1),
    lambda: torch.randn(200, 200)[:, ::2],  # with gaps
    lambda: torch.randn(9000)[1:],  # not on a word's boundary
    lambda: torch.randn(5000, dtype=torch.bfloat16),
    lambda: torch.randint(0, 9, (123, 45)),
    lambda: torch.randn(64, 64, dtype=torch.complex64),
]


@pytest.mark.parametrize("make", VALUES)
def test_it_is_equal_for_what_stayed_and_no_other(make) -> None:
    torch.manual_seed(0)
    assert _same(make(), lambda value: None)
    assert not _same(make(), lambda value: value.data.add_(1))
    assert not _same(make(), lambda value: value.data.neg_())
    assert not _same(make(), lambda value: value.data.copy_(value.flip(0)))
    assert not _same(make(), lambda value: value.data.view(-1)[3:4].zero_() if value.is_contiguous() else value.zero_())


def test_an_empty_tensor_has_one() -> None:
    assert _same(torch.empty(0, 3), lambda value: None)
    assert _same(torch.tensor(2.0), lambda value: None)


@pytest.mark.parametrize(("size", "most"), [(8192, 0), (2**15, 8 * 1024)])
def test_on_the_cpu_it_takes_nothing_of_a_small_budget_and_keeps_nothing(size, most) -> None:
    value = torch.randn(size)
    assert memopt.measure(fingerprint_of, value, device="cpu").peak_bytes <= most
    assert isinstance(fingerprint_of(value), int)


def test_of_a_tensor_that_wraps_others_what_those_hold_is_read() -> None:
    jagged = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged)
    assert _same(jagged, lambda value: None)
    assert not _same(jagged, lambda value: value.values().data.add_(1))
    sparse = torch.eye(3).to_sparse()
    assert not _same(sparse, lambda value: value.data._values().add_(1))
