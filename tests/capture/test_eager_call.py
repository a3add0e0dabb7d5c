"""What a call takes as PyTorch itself runs it."""

import contextlib

import pytest
import torch
from torch import nn

from memopt.capture.eager_call import eager_call
from memopt.memory.cost.table import CostTable
from memopt.memory.measure import measure
from memopt.step.graph_peaks import step_peak


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.second(self.first(x).tanh())


def test_what_is_saved_is_counted_and_nothing_changes():
    model, x = Two(), torch.randn(3, 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = eager_call(model, (x,), {}, None)
    assert found.peaks.saved >= 3 * 8 * 4, "tanh keeps its result"
    assert dict(found.peaks.gradients) == {name: p.nbytes for name, p in model.named_parameters()}
    assert not found.by_values and not found.by_chance
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_gradients_that_exist_are_not_made_and_inference_makes_none():
    model, x = Two(), torch.randn(3, 4)
    model(x).sum().backward()
    assert eager_call(model, (x,), {}, None).peaks.gradients == ()
    found = eager_call(model, (x,), {}, None, backward=False)
    assert found.peaks.backward <= found.peaks.forward and found.peaks.gradients == ()


def test_a_model_that_cannot_run_on_fake_tensors_is_not_known():
    class Raises(nn.Module):
        def forward(self, x):
            raise NotImplementedError

    assert eager_call(Raises(), (torch.ones(2),), {}, None) is None


def test_what_modules_keep_and_values_that_were_looked_at_are_told():
    class Keeps(Two):
        def forward(self, x):
            self.kept = x * 2
            return super().forward(x) if int(self.count) else x.sum()

    model = Keeps()
    model.register_buffer("count", torch.ones((), dtype=torch.long))
    found = eager_call(model, (torch.randn(3, 4),), {}, None)
    assert found.kept == 3 * 4 * 4 and found.by_values
    assert not hasattr(model, "kept"), "the twin's alone"


class Keeps(nn.Module):
    """An activation is kept with its gradient; at each call anew, or in the first one alone."""

    def __init__(self, again: bool = True) -> None:
        super().__init__()
        self.first, self.second, self.again = nn.Linear(16, 64), nn.Linear(64, 64), again

    def forward(self, x):
        y = self.first(x).tanh()
        if self.again or not hasattr(self, "kept"):
            y.retain_grad()
            self.kept = y
        return self.second(y).tanh().sum()


def test_what_a_call_keeps_is_counted_once_where_the_next_call_makes_it_anew():
    model, x = Keeps(), torch.randn(32, 16)
    found = eager_call(model, (x,), {}, CostTable())
    assert found.kept == found.made == 2 * 32 * 64 * 4, "with its gradient"

    def steps() -> None:
        for _ in range(2):
            model(x).backward()
            model.zero_grad()

    # Of both steps, as what was there before a recording is let go of unseen in it.
    assert step_peak([found.peaks]) == pytest.approx(measure(steps, device="cpu").peak_bytes, abs=16)
    around = eager_call(model, (x,), {}, CostTable(), around=lambda twin: contextlib.nullcontext(), renews=True)
    assert around.peaks == found.peaks and around.made == found.made


def test_what_a_call_keeps_for_good_is_no_part_of_the_next():
    model, x = Keeps(again=False), torch.randn(32, 16)
    model(x).backward()
    model.zero_grad()
    found = eager_call(model, (x,), {}, CostTable())
    assert found.made == 0 and found.kept == 2 * 32 * 64 * 4
    assert step_peak([found.peaks]) == pytest.approx(
        measure(lambda: model(x).backward(), device="cpu").peak_bytes, abs=16
    )
