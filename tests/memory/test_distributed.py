"""What data parallelism holds: buckets as large as the gradients, counted by the reducer's own allocations."""

from __future__ import annotations

import pytest
import torch

import memopt
from memopt.memory.distributed import Buckets, buckets_of
from tests.training.steps import Deep

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")


@pytest.fixture
def alone(tmp_path):
    """A process group of one."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_buckets_are_as_large_as_the_gradients():
    from torch.nn.parallel import DistributedDataParallel

    model = Deep()
    model.layers[0].requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    nbytes = sum(p.nbytes for p in trained)
    assert buckets_of(model) == Buckets()
    wrapped = memopt.measure(DistributedDataParallel, model, device="cpu")
    assert wrapped.end_bytes >= nbytes
    reduced = frozenset(id(p) for p in trained)
    assert buckets_of(wrapped.value) == Buckets(nbytes, reduced=reduced)
    assert buckets_of(torch.nn.Sequential(wrapped.value)) == Buckets(nbytes, reduced=reduced)
    viewed = DistributedDataParallel(model, gradient_as_bucket_view=True)
    assert buckets_of(viewed) == Buckets(nbytes, viewed=reduced, reduced=reduced)


@pytest.mark.usefixtures("alone")
def test_the_one_that_runs_around_is_found_and_ignored_parameters_are_not_counted():
    from torch.nn.parallel import DistributedDataParallel

    seen = []

    class Inner(Deep):
        def forward(self, x):
            seen.append(buckets_of(self))
            return super().forward(x)

    model = Inner()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["norm.weight"])
    DistributedDataParallel(model)(torch.ones(2, 24))
    reduced = [p for name, p in model.named_parameters() if name != "norm.weight"]
    assert seen == [Buckets(sum(p.nbytes for p in reduced), reduced=frozenset(map(id, reduced)))]
    assert buckets_of(model) == Buckets()


@pytest.mark.usefixtures("alone")
def test_gradients_that_are_summed_up_outside_of_buckets_take_memory_of_their_own():
    from torch.nn.parallel import DistributedDataParallel

    every, seen = [], []

    class Inner(Deep):
        def forward(self, x):
            seen.append(len(buckets_of(self).viewed))
            return super().forward(x)

    for accumulates in (False, True):
        replica = DistributedDataParallel(Inner(), gradient_as_bucket_view=True)
        every.append(len(list(replica.parameters())))
        for _ in range(2):
            if accumulates:
                with replica.no_sync():
                    replica(torch.ones(2, 24)).sum().backward()
            replica(torch.ones(2, 24)).sum().backward()
            replica(torch.ones(2, 24)).sum().backward()  # on what was reduced, which lies in buckets
            replica.zero_grad()
    assert seen == [every[0]] * 4 + [0] * 6
