"""Parts of a rewrite taken over by themselves."""

import pytest
import torch
from torch import nn

from memopt.difference.transplant import Tangled, cut, transplant
from memopt.passes.fuse_conv_bn import FuseConvBn
from tests.support import capture

X = torch.randn(2, 3, 8, 8)


@pytest.fixture(scope="module")
def whole():
    """Two convolutions with batch norms, and both folded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    for norm in (model[1], model[4]):
        norm.running_mean.normal_()
    before = capture(model.eval(), X)
    result = FuseConvBn().run(before)
    return cut(before, result.program, result.changes)


def norms(program):
    return sum("batch_norm" in str(node.target) for node in program.calls)


def test_no_part_is_the_first_program_and_all_are_the_second(whole):
    assert transplant(whole, []) is whole.before
    assert norms(whole.before) == 2 and norms(transplant(whole, whole.parts)) == 0


def test_each_part_can_be_taken_over_by_itself(whole):
    counts = set()
    for part in whole.parts:
        try:
            program = transplant(whole, [part])
        except Tangled:
            continue
        program.check()
        counts.add(norms(program))
    assert 1 in counts, "one of the two"


def test_equal_programs_have_no_parts(whole):
    assert cut(whole.before, whole.before).parts == ()
