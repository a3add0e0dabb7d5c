import gc
import weakref

import torch
from torch import nn

import memopt


def test_code_does_not_hold_the_batch_that_it_was_made_with():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    call = memopt.compile(model, "1MB", backend="inductor")
    x = torch.randn(16, 8)
    seen = weakref.ref(x)
    call(x).sum().backward()
    del x
    gc.collect()
    assert seen() is None
