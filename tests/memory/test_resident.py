"""What is there during the whole step, counted by storage."""

import torch

from memopt.memory.optimizer import optimizer_footprint
from memopt.memory.resident import Resident, storage_bytes


def test_a_storage_counts_once_whatever_looks_at_it():
    base = torch.zeros(64)
    assert storage_bytes([base, base[:8], base.view(8, 8), None, 3]) == 256
    assert storage_bytes([base, torch.zeros(64)]) == 512
    assert storage_bytes([base[:8]]) == 256


def test_on_another_device_sizes_are_as_its_allocator_rounds():
    assert storage_bytes([torch.zeros(1)], torch.device("cuda")) == 512


def test_the_total_is_what_is_there_in_forward_and_backward():
    weight = torch.nn.Parameter(torch.ones(64))
    footprint = optimizer_footprint(torch.optim.SGD([weight], lr=0.1, momentum=0.9), [weight], None)
    resident = Resident(parameters=1, buffers=2, inputs=4, gradients=8, libraries=16, trainable=10**6)
    assert resident.total == 31 and resident.optimizer_state == 0
    with_optimizer = Resident(parameters=1, optimizer=footprint)
    assert with_optimizer.total == 1 + footprint.state_bytes == 257
