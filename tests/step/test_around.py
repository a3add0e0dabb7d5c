"""What of a loop is worth a plan; what loops hold is in tests/training/test_loops.py."""

import torch

from memopt.step.around import worth


def test_a_few_numbers_are_not_planned_for_on_any_device():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert worth(256, cpu) == 0 and worth(257, cpu) == 257
    assert worth(16 * 512, gpu) == 0 and worth(16 * 512 + 1, gpu) == 16 * 512 + 1
