"""Which gradients of a graph its backward hands over: those that are wanted early, by an engine that is able to."""

import torch
from torch import nn

import memopt
from memopt.capture.handed import Handed
from memopt.memory.hand_over import marked
from memopt.step.hooked import EarlyGradients, Hooked


def captured(model, x):
    """The joint program of a model's step."""
    torch._dynamo.reset()
    run = memopt.compile(model, backend="aten")
    run(x).sum().backward()
    return run._memopt.last.step.planned[0].source


def test_none_as_long_as_no_engine_is_able_to_and_added_ones_where_the_budget_needs_them():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4)
    program, names, handed = captured(model, x), frozenset({"1.weight"}), Handed()
    handed.find(program, lambda: True)
    handed.cut(program)
    assert not handed.early and not handed.gone and handed.how is None
    handed.may(EarlyGradients(Hooked(model), names))
    for lacks in (True, False):
        handed.find(program, lambda lacks=lacks: lacks)
        assert handed.early == handed.gone == (names if lacks else frozenset())
        handed.cut(marked(program, handed.gone))
        assert (handed.how is not None) == lacks, "what was cut before is forgotten"


def test_what_is_to_be_gone_is_told_by_place():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4)
    program, handed = captured(model, x), Handed()
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    hooked = Hooked(model)
    handed.may(EarlyGradients(hooked, frozenset({"1.bias"})))
    handed.find(program, lambda: True)
    assert handed.gone == {"0.weight", "1.bias"}
    watched = handed.watched(sorted)
    assert list(watched.dropped) == ["0.weight"] and list(watched.added) == ["1.bias"]
    watched.waits()
    assert hooked.waited and not hooked.kept
