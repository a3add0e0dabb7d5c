"""How long first steps take, remembered from one to the next."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memopt
from memopt.calls.pace import Pace
from memopt.common import progress


@pytest.mark.usefixtures("own_caches")
def test_a_model_goes_by_its_own_pace_and_others_by_the_latest():
    assert Pace("Engine", "cpu", "First").seconds is None
    Pace("Engine", "cpu", "First").took(100, 50.0)
    Pace("Engine", "cpu", "Second").took(100, 20.0)
    Pace("Engine", "cpu", "Second").took(0, 20.0)
    found = [
        Pace("Engine", device, name).seconds for device, name in (("cpu", "First"), ("cpu", "?"), ("cuda", "First"))
    ]
    assert found == [0.5, 0.2, None]


@pytest.mark.usefixtures("own_caches")
def test_the_second_model_of_a_kind_knows_what_to_expect(monkeypatch):
    seen = []
    monkeypatch.setattr(progress.Planning, "stage", lambda self, text: seen.append((text, self.expected)))
    for _ in range(2):
        run = memopt.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), "1MB", backend="aten")
        run(torch.ones(2, 4)).sum().backward()
    expected = [seconds for text, seconds in seen if text.startswith("a graph of")]
    assert expected[0] is None and expected[1] is not None and expected[1] > 0
