"""What modules hold: by name down into containers and objects, and back to what it was."""

import collections
import dataclasses
import types

import torch
from torch import nn

from memopt.calls.held import Held, leaves_of, structure_of


@dataclasses.dataclass
class Pair:
    first: object
    second: object


def test_values_are_named_and_returned_to():
    model = nn.Sequential(nn.Linear(2, 2))
    queue, counts, inner = collections.deque([1, 2], maxlen=2), collections.Counter(a=1), types.SimpleNamespace(n=1)
    model[0].queue, model[0].counts, model[0].inner, model[0].stats = queue, counts, inner, {"deep": [3, {"er": 4}]}
    model[0].both, state = (queue, 5), torch.ones(1)
    model[0].state = state
    held = Held(model)
    assert held.values["0.queue[1]"] == 2 and held.values["0.counts['a']"] == 1 and held.values["0.inner.n"] == 1
    assert held.values["0.stats['deep'][1]['er']"] == 4 and held.values["0.state"] is state
    queue.append(9)
    counts.update("ab")
    inner.n, inner.m, model[0].stats["deep"][1]["er"], model[0].extra = 2, 3, 0, 1
    model[0].weight = nn.Parameter(torch.zeros(2, 2))
    held.restore()
    assert list(queue) == [1, 2] and queue.maxlen == 2 and counts == {"a": 1} and vars(inner) == {"n": 1}
    assert model[0].stats == {"deep": [3, {"er": 4}]} and not hasattr(model[0], "extra")
    assert Held(model).values.keys() == held.values.keys() and model[0].weight.abs().sum() > 0


def test_what_holds_itself_ends():
    model = nn.Identity()
    model.loop = [1]
    model.loop.append(model.loop)
    assert Held(model).values["length of loop"] == 2


def test_structures_are_named_with_classes_and_keys():
    point = collections.namedtuple("Point", "x y")
    value = {"a": [1, (2,)], "b": point(1, 2), "c": Pair(1, [2])}
    assert structure_of(value) == "dict('a': list(., tuple(.)), 'b': Point(., .), 'c': Pair(first=., second=list(.)))"
    assert structure_of(torch.Size([2])) == "." and len(list(leaves_of(value))) == 6
