"""Which modules run, and under which names."""

import torch
from torch import nn

from memopt.monitoring.modules import ModuleWatch
from memopt.monitoring.tracker import Tracker


def watched(run, called=lambda *_: None):
    watch = ModuleWatch(called)
    with Tracker(torch.device("cpu"), watch, lambda _: None):
        run()
    return watch


def test_calls_in_a_row_of_modules_that_differ_are_told_apart():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8))
    records = {r.name: r for r in watched(lambda: model(torch.ones(16, 4))).records()}
    assert list(records) == ["Sequential", "0", "1"]
    assert records["0"].peak == 16 * 4 * 4 and records["1"].peak == 16 * 8 * 4
    assert records["Sequential"].peak == 16 * 12 * 4  # while the second runs, what the first has made is there


def test_two_of_a_class_are_numbered_and_a_loss_is_a_module_too():
    first, second, loss = nn.Linear(2, 2), nn.Linear(2, 2), nn.L1Loss()
    watch = watched(lambda: loss(second(first(torch.ones(1, 2))), torch.zeros(1, 2)))
    assert [record.name for record in watch.records()] == ["Linear", "Linear#2", "L1Loss"]
    assert watch.name_of(second) == "Linear#2" and watch.name_of(nn.Linear(1, 1)) == ""
    assert watch.models() == [first, second, loss]


def test_modules_that_come_in_later_or_are_held_by_none_have_names():
    class Grows(nn.Module):
        def forward(self, x):
            if not hasattr(self, "later"):
                self.later = nn.Linear(2, 2)
            return nn.ReLU()(self.later(x))

    names = [record.name for record in watched(lambda: Grows()(torch.ones(1, 2))).records()]
    assert names == ["Grows", "later", "ReLU"]


def test_outermost_calls_are_told_with_their_arguments():
    seen = []
    model = nn.Sequential(nn.Linear(2, 2))
    watched(lambda: model(input=torch.ones(1, 2)), lambda *call: seen.append(call))
    ((module, args, kwargs),) = seen
    assert module is model and args == () and list(kwargs) == ["input"]


def test_what_torch_compile_made_goes_by_its_model():
    model = nn.Sequential(nn.Linear(2, 2))
    compiled = torch.compile(model, backend="eager")
    watch = watched(lambda: compiled(torch.ones(1, 2)))
    assert next(record.name for record in watch.records()) == "Sequential" and watch.models() == [model]
