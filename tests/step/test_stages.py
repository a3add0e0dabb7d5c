"""Passes by their place around the plan."""

import dataclasses

import torch

from memopt.pass_manager import Pass, PassResult
from memopt.passes import TRAINING
from memopt.passes.channels_last import ChannelsLast
from memopt.passes.checkpoint import Checkpoint
from memopt.step.pass_memo import PassMemo
from memopt.step.stages import judged, replay, stages_of
from tests.support import capture


@dataclasses.dataclass
class Noted(Pass):
    """Changes nothing, and notes that it ran."""

    name: str
    ran: list
    lowers_floor: bool = False

    def run(self, program):
        self.ran.append(self.name)
        return PassResult(program, (), ())


def named(ran, *names):
    return [Checkpoint() if name == "plan" else Noted(name, ran, name.startswith("lower")) for name in names]


def test_passes_are_sorted_around_the_plan():
    stages = stages_of(named([], "a", "lower b", "c", "plan", "d"))
    assert [item.name for item in stages.early] == ["a", "c"]
    assert [item.name for item in stages.lowering] == ["lower b"]
    assert [item.name for item in stages.late] == ["d"] and stages.searched


def test_without_a_plan_all_are_early():
    stages = stages_of(named([], "a", "lower b"))
    assert [item.name for item in stages.early] == ["a", "lower b"]
    assert not stages.searched and stages.lowering == stages.late == ()


def test_a_plan_is_replayed_with_the_rewrites_that_it_was_made_with():
    ran = []
    stages = stages_of(named(ran, "a", "lower b", "lower c", "plan", "d"))
    program = capture(torch.nn.ReLU(), torch.ones(2))
    assert replay(program, stages, stages.lowering[1:], None) is program
    assert ran == ["a", "lower c", "d"]


def test_rewrites_are_found_by_their_keys_in_their_order():
    stages = stages_of(TRAINING)
    keys = [item.key for item in stages.lowering]
    assert stages.called(keys) == stages.lowering
    assert stages.called(keys[:1]) == stages.lowering[:1]
    assert stages.called(["unheard of"]) is None


def test_a_judge_is_given_to_what_lays_out_alone():
    passes = judged(TRAINING, lambda *_: None)
    assert [type(item) for item in passes] == [type(item) for item in TRAINING]
    assert all((new is old) != isinstance(old, ChannelsLast) for new, old in zip(passes, TRAINING, strict=True))


def test_what_is_laid_out_first_is_known():
    program = capture(torch.nn.ReLU(), torch.ones(2))
    assert not stages_of(TRAINING).lays_out(program, PassMemo())
