"""Bytes that a loop holds around a model's graphs: what of them is worth a plan, and what is said of them."""

import torch

from memopt.step.loop_bytes import Seen, worth


def test_a_few_numbers_are_not_planned_for_on_any_device():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert worth(256, cpu) == 0 and worth(257, cpu) == 257
    assert worth(16 * 512, gpu) == 0 and worth(16 * 512 + 1, gpu) == 16 * 512 + 1


def test_steps_that_were_seen_are_joined_by_the_most_of_each():
    first, second = Seen(between=5, held=1, more=2), Seen(between=3, held=4, known=True, behind=7)
    assert first.joined(second) == second.joined(first) == Seen(between=5, held=4, known=True, more=2, behind=7)
    assert first.joined(second).beside == 4 + 2


def test_only_what_is_held_is_said():
    assert str(Seen()) == ""
    assert str(Seen(held=3_000_000, known=True)) == "3.00 MB that the loop keeps in backward"
