"""A deque of limited length drops its oldest items, call by call, as it does in eager."""

from __future__ import annotations

import collections

import pytest
import torch
from torch import nn

import memopt

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Recent(nn.Module):
    def __init__(self, most, add) -> None:
        super().__init__()
        self.layer, self.add, self.seen = nn.Linear(8, 8), add, collections.deque(maxlen=most)

    def forward(self, x):
        self.add(self.seen, x)
        return self.layer(x) * (1 + sum(self.seen)) + len(self.seen)


ADDS = {
    "numbers": lambda seen, x: seen.append(1.0 + len(seen)),
    "tensors": lambda seen, x: seen.append(x.mean()),
    "on the left": lambda seen, x: seen.appendleft(x.sum()),
    "several": lambda seen, x: seen.extend([x.mean(), x.sum(), 1.0]),
}


def _calls(make, most, add):
    torch.manual_seed(0)
    model = Recent(most, ADDS[add])
    run = make(model)
    outputs = [run(torch.full((4, 8), 1.0 + number)).detach() for number in range(5)]
    return outputs, [float(each) for each in model.seen], model.seen.maxlen


@pytest.mark.quick("2-tensors")
@pytest.mark.parametrize("add", ADDS)
@pytest.mark.parametrize("most", [2, None])
def test_what_is_full_drops_the_oldest(most, add) -> None:
    found = _calls(lambda model: memopt.compile(model, backend="aten"), most, add)
    torch.testing.assert_close(found[0], _calls(lambda model: model, most, add)[0])
    assert found[1:] == _calls(lambda model: model, most, add)[1:]
