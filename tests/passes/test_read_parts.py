"""ReadParts: what was written to a part is read as it was; what the caller sees, and other parts, stay."""

import pytest
import torch

from memopt.memory.timeline import timeline
from memopt.passes.eliminate_dead import EliminateDead
from memopt.passes.read_parts import ReadParts
from tests.passes.build import capture_joint, check, reasons, trace
from tests.support import apply, targets

X = torch.arange(12.0).reshape(3, 4) - 5


def traced(function, *tensors):
    return trace(torch.func.functionalize(function, remove="mutations"), *tensors)


def swept(function, *tensors):
    result = check(ReadParts(), traced(function, *tensors), *tensors)
    return result, targets(apply(EliminateDead(), result.program).program)


def tile(x):
    buffer = x.new_empty(3, 10)
    buffer[:, 2:6] = x.sin()
    return (buffer[:, 2:6].cos(),)


def tile_of_both(x):
    buffer = x.new_empty(5, 10)
    part = buffer[:3, :4]
    part.copy_(x.sin())
    part.mul_(2).add_(1)
    return (part.exp(),)


def row(x):
    buffer = x.new_zeros(3, 2, 4)
    buffer[:, 1] = x.sin()
    return (buffer[:, -1].cos(),)


def written_again(x):
    buffer = x.new_empty(3, 10)
    for step in range(3):
        buffer[:, -4:] = x * step
        buffer[:, -4:].exp_()
    return (buffer[:, 6:10] + 1,)


@pytest.mark.parametrize("function", [tile, tile_of_both, row, written_again])
def test_nothing_is_left_of_a_buffer_that_is_read_as_it_was_written(function):
    _, left = swept(function, X)
    assert not [each for each in left if "scatter" in each or "empty" in each or "copy" in each or "zeros" in each]


def other_part(x):
    buffer = x.new_zeros(3, 10)
    buffer[:, 2:6] = x.sin()
    return (buffer[:, 3:7].cos(),)


def other_step(x):
    buffer = x.new_zeros(3, 10)
    buffer[:, 2:10:2] = x.sin()
    return (buffer[:, 2:6].cos(),)


def broadcast(x):
    buffer = x.new_zeros(3, 10)
    buffer[:, 2:6] = x[:, :1].sin()
    return (buffer[:, 2:6].cos(),)


def converted(x):
    buffer = x.new_zeros(3, 10, dtype=torch.float64)
    buffer[:, 2:6] = x.sin()
    return (buffer[:, 2:6].cos(),)


@pytest.mark.parametrize("function", [other_part, other_step, broadcast, converted])
def test_what_is_not_just_what_was_written_stays_right(function):
    swept(function, X)


def test_only_the_part_that_was_written_again_is_gone():
    def twice(x):
        buffer = x.new_zeros(3, 10)
        buffer[:, 2:6] = x.sin()
        buffer[:, 2:6] = x.cos()
        return (buffer.exp(),)

    result, left = swept(twice, X)
    assert sum("slice_scatter" in each for each in left) == 1
    assert result.changes


def test_a_part_that_is_returned_keeps_its_strides():
    def shown(x):
        buffer = x.new_zeros(3, 10)
        buffer[:, 2:6] = x.sin()
        return buffer[:, 2:6], buffer

    result, _ = swept(shown, X)
    assert "it is an output" in reasons(result).values()


def test_what_is_shown_of_a_part_keeps_its_strides():
    def shown(x):
        buffer = x.new_zeros(3, 10)
        buffer[:, 2:6] = x.sin()
        return (buffer[:, 2:6].t(),)

    swept(shown, X)


def test_strides_that_are_read_by_number_stay():
    def strided(x):
        buffer = x.new_zeros(3, 10)
        buffer[:, 2:6] = x.sin()
        return (buffer[:, 2:6].as_strided((3, 2), (10, 1)).cos(),)

    swept(strided, X)


def test_backward_does_not_read_what_the_caller_may_write_to():
    def both(x):
        written = x.sin()
        buffer = x.new_zeros(3, 10)
        buffer[:, 2:6] = written
        return written, buffer[:, 2:6].exp() * buffer[:, 2:6]

    x = X.clone().requires_grad_()
    result = check(ReadParts(), capture_joint(lambda x: sum(each.sum() for each in both(x)[1:]), x), x)
    assert result.changes
    result = apply(ReadParts(), capture_joint(both, x))
    assert any("would share memory" in each for each in reasons(result).values())


def test_a_tile_in_a_large_buffer_takes_no_more_than_the_tile():
    def tiles(x):
        buffer = x.new_empty(3, 100_000)
        for start in (0, 4):
            part = buffer[:, :4]
            part.copy_(x[:, start : start + 4].sin())
            part.add_(1)
            x = x + torch.cat([part, part], 1)
        return (x,)

    x = torch.randn(3, 8)
    program = traced(tiles, x)
    assert timeline(program).peak_bytes > 1_200_000
    assert timeline(apply(EliminateDead(), check(ReadParts(), program, x).program).program).peak_bytes < 10_000
