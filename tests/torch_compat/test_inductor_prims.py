"""Inductor's own operators."""

import torch

from memopt.torch_compat.inductor_prims import prims


def test_those_that_passes_know_compute_what_they_are_known_for():
    x = torch.randn(1, 1, 4, 4)
    values, offsets = prims._low_memory_max_pool_with_offsets(x, [2, 2], [2, 2], [0, 0], [1, 1], False)
    expected, indices = torch.nn.functional.max_pool2d(x, 2, return_indices=True)
    found = prims._low_memory_max_pool_offsets_to_indices(offsets, [2, 2], [4, 4], [2, 2], [0, 0], [1, 1])
    assert torch.equal(values, expected) and torch.equal(found, indices)
    assert prims.convert_element_type(x, torch.float64).dtype is torch.float64
