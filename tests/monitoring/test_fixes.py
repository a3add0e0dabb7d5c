"""What would help, the cheapest first."""

import gc
import weakref

import torch
from torch import nn

from memopt.monitoring import fixes as module
from memopt.monitoring.fixes import Call, fixes
from memopt.monitoring.record import Filled, Leak, OutOfMemory, TensorGroup

GROUP = TensorGroup(4, 400, (25,), "float32", "loop", "", "train.py:3, kept.append(loss)", "aten.add")
MODEL = nn.Sequential(nn.Linear(8, 8), nn.ReLU())


def short(**more):
    return OutOfMemory("no room", 5, "forward", "0", "", Filled(1000, ()), **more)


def call(*args, **kwargs):
    return Call.of(MODEL, args, kwargs)


def test_what_each_step_leaves_comes_first_and_little_is_no_fix(monkeypatch):
    monkeypatch.setattr(module, "segments_expand", lambda: False)
    moment = short(reserved=1500, others=300, capacity=2000)
    found = fixes(moment, [Leak(GROUP, 4, True), Leak(GROUP, 4, False)], None, None, [])
    assert [line.split(":")[0] for line in found[:2]] == ["free 400 B", "free 400 B"]
    assert "detach()" in found[0] and "keep fewer" in found[1] and "(kept.append(loss))" in found[0]
    assert found[2].startswith("500 B are reserved") and "expandable_segments:True" in found[2]
    assert found[3].startswith("300 B of the device are not PyTorch's") and len(found) == 4
    assert fixes(short(reserved=1010, others=10, capacity=2000), [], None, None, []) == ()


def test_the_planner_is_asked_of_what_others_leave():
    moment = short(reserved=1000, others=10, capacity=50_000_010)
    (line,) = fixes(moment, [], None, call(torch.ones(4, 8)), [])
    assert line.startswith('memopt.compile(model, budget="50MB"): a predicted peak of ')


def test_a_budget_that_is_too_small_is_said_with_its_least():
    (line,) = fixes(short(), [], 600, call(torch.ones(4, 8)), [])
    assert line.startswith('memopt.compile(model, budget="600B") does not fit: ') and "the minimum is" in line


def test_what_cannot_be_planned_is_said():
    (line,) = fixes(short(), [], 10**6, call(object()), [])
    assert line == "no plan: the model was called with a object"
    assert fixes(short(), [], None, call(torch.ones(4, 8)), []) == ()  # no limit is known


def test_a_call_holds_neither_model_nor_inputs():
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    seen = weakref.ref(x), weakref.ref(model)
    kept = Call.of(model, (x,), {})
    del model, x
    gc.collect()
    assert [one() for one in seen] == [None, None] and kept.model() is None
