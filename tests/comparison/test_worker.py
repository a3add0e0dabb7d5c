"""What a row's process says of a refusal."""

import torch

import memopt
from memopt.comparison.worker import refusal


def test_a_refusal_names_the_least_or_what_was_in_the_way():
    assert refusal(memopt.BudgetError(2_000, 1_000)) == "refused: the least is 2.00 kB (1.95 KiB)"
    within = memopt.BudgetError(1_000, 2_000)
    assert refusal(within).endswith("is within the budget: steps took more than was planned")
    try:
        raise within from torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    except memopt.BudgetError as error:
        # Such a row is run once more, alone: see Pool.
        assert refusal(error).endswith("OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")
