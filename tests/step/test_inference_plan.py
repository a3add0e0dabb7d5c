"""How an inference program is made to fit: whole, without folded weights, in chunks, or not at all."""

import pytest
import torch
from torch import nn

from memopt.memory.timeline import timeline
from memopt.step.inference_plan import HopelessError, plan_within
from memopt.step.planned import constant_bytes
from tests.step.test_inference import deep, session_with
from tests.support import capture, run


def taken(planned):
    return constant_bytes(planned.program) + planned.timeline.peak_bytes


@pytest.fixture(scope="module")
def convolution():
    """A convolution whose batch norm is folded: weights that are held beside the model's own."""
    model = nn.Sequential(nn.Conv2d(64, 64, 3), nn.BatchNorm2d(64), nn.ReLU()).eval()
    return capture(model, torch.randn(2, 64, 6, 6))


def within(program, room):
    return plan_within(session_with(None), program, timeline(program), room)


def test_without_a_limit_weights_are_folded(convolution):
    planned, reason = within(convolution, None)
    assert reason == "" and constant_bytes(planned.program) > 64 * 64 * 9 * 4
    assert any(record.name == "fuse_conv_bn" and record.changes for record in planned.records)


def test_where_folded_weights_have_no_room_they_are_not_made(convolution):
    folded, _ = within(convolution, None)
    planned, reason = within(convolution, taken(folded) - 1)
    assert reason == "" and taken(planned) < taken(folded)
    assert constant_bytes(planned.program) == 0
    x = torch.randn(2, 64, 6, 6)
    torch.testing.assert_close(run(planned.program, x), run(convolution, x))


def test_what_fits_in_no_way_is_the_one_that_takes_least():
    program = deep(1)
    whole, _ = within(program, None)
    least, _ = within(program, 1)
    assert 1 < taken(least) < taken(whole)
    assert taken(within(program, taken(least))[0]) <= taken(least)


def test_what_cannot_be_divided_is_said():
    class Product(nn.Module):
        def forward(self, x):
            return (x @ x.t()).softmax(0)

    planned, reason = within(capture(Product(), torch.randn(16, 16)), 1)
    assert taken(planned) > 1 and reason


def test_far_from_all_plans_none_is_made_and_the_least_that_is_named_can_be():
    program = deep(12)
    with pytest.raises(HopelessError) as hopeless:
        within(program, 1)
    error = hopeless.value
    assert taken(error.planned) > error.minimum_bytes > 1 and str(error.minimum_bytes) in str(error)
    planned, _ = within(program, error.minimum_bytes)
    assert taken(planned) <= error.minimum_bytes
