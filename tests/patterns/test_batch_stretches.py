"""Stretches of a training step that run on some samples at a time: where they begin, and where they end."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from memopt.passes.eliminate_copies import EliminateCopies
from memopt.passes.split_batch import own_bytes
from memopt.patterns.batch import Batched, Summed, batch_of
from memopt.patterns.batch_stretches import find_spans
from memopt.program import Phase
from tests.passes.build import capture_joint


def found(function, *tensors):
    program = EliminateCopies().run(capture_joint(function, *tensors)).program
    return program, find_spans(program, batch_of(program), {node: own_bytes(node) for node in program.calls})


def tensors_of(*channels, size=16):
    shapes = [(4, channels[0], size, size), *((b, a, 3, 3) for a, b in itertools.pairwise(channels))]
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_(index > 0) for index, shape in enumerate(shapes)]


def test_a_stretch_for_each_phase_with_its_sums():
    def loss(x, w, v):
        return F.conv2d(F.relu(F.conv2d(x, w, padding=1)), v, padding=1).square().sum()

    program, spans = found(loss, *tensors_of(3, 8, 8))
    assert spans.size == 4 and len(spans.spans) == 2
    for span, phase in zip(spans.spans, Phase, strict=True):
        assert {node.meta["phase"] for node in span.members} == {phase}
        names = {node.name for node in span.members}
        assert names >= ({"convolution", "relu", "convolution_1"} if phase is Phase.FORWARD else {"threshold_backward"})
    states = [spans.spans[1].rules[node].state for node in spans.spans[1].members]
    assert states.count(Summed()) == 2 and Batched(0) in states
    assert spans.outside[program.placeholders[0]] == Batched(0) and spans.outside[program.placeholders[1]] is None


def test_light_operations_are_inside_but_not_at_the_ends():
    def loss(x, w, v):
        x = F.conv2d(x.sin(), w, padding=1)
        low = F.max_pool2d(x, 8)
        for _ in range(6):
            low = low.sin()
        x = F.conv2d(x + low.amax((2, 3), keepdim=True), v, padding=1)
        return F.max_pool2d(x, 8)[:, 2:].cos().square().sum()

    program, spans = found(loss, *tensors_of(1, 8, 8, size=32))
    forward = [span for span in spans.spans if span.members[0].meta["phase"] is Phase.FORWARD]
    assert len(forward) == 1
    inside = [node.name for node in forward[0].members]
    assert inside[0] == "convolution" and "sin_3" in inside and "cos" not in inside
    assert inside[-1] == "slice_1", "there is less to put together behind it than before it"
    assert all(node in program.calls for node in forward[0].members)


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (lambda x: F.dropout(x, 0.5), "draws random numbers"),
        (lambda x: F.batch_norm(x, None, None, training=True), "over the whole batch"),
        (lambda x: x - x.mean(0, keepdim=True), "one of several"),
        (lambda x: x.flip(0), "the batch"),
    ],
)
def test_operators_that_mix_samples_end_a_stretch(between, reason):
    def loss(x, w, v):
        return F.conv2d(between(F.conv2d(x, w, padding=1)), v, padding=1).square().sum()

    program, spans = found(loss, *tensors_of(3, 8, 8))
    ends = {node.name for node in spans.reasons}
    inside = {node.name for span in spans.spans for node in span.members}
    assert {"convolution", "convolution_1"} <= inside and ends and not ends & inside
    if reason in ("draws random numbers", "over the whole batch"):
        assert any(reason in text for text in spans.reasons.values())
    forward = [span for span in spans.spans if span.members[0].meta["phase"] is Phase.FORWARD]
    assert len(forward) == 2 and all(node in program.calls for node in forward[0].members)


def test_programs_without_a_batch_and_without_heavy_convolutions():
    x, w = torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3, requires_grad=True)
    assert batch_of(capture_joint(lambda x, w: F.conv2d(x, w).sum(), x, w)) == 0

    def loss(x, w, v):
        light = F.conv2d(x, w).mean()
        return (v @ v).sum() * light

    _, spans = found(loss, *tensors_of(3, 4), torch.randn(512, 512, requires_grad=True))
    assert not spans.spans
