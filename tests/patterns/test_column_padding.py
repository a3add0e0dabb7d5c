"""Padding of columns: what is recognised as such, and transposed matrices that are padded before they are turned."""

import pytest
import torch
import torch.nn.functional as F

from memopt.patterns.column_padding import cuts_columns, pads_columns, pads_of, turn_after_padding
from tests.passes.build import trace
from tests.support import assert_same


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x[:, :5], True),
        (lambda x: x[..., 0:5], True),
        (lambda x: x[:, 1:5], False),
        (lambda x: x[:5], False),
        (lambda x: x[:, :5:2], False),
    ],
)
def test_leading_columns(function, expected):
    program = trace(lambda x: (function(x),), torch.randn(8, 8))
    assert any(cuts_columns(node) for node in program.calls) is expected


@pytest.mark.parametrize(("pads", "expected"), [((0, 3), True), ((0, 3, 0, 0), True), ((0, 0, 0, 3), False)])
def test_padded_columns(pads, expected):
    program = trace(lambda x: (torch.ops.aten.constant_pad_nd(x, list(pads)),), torch.randn(8, 8))
    (node,) = program.calls
    assert pads_columns(node) is expected
    assert pads_of(node) == list(pads)


def test_a_transposed_matrix_is_padded_before_it_is_turned_and_once_for_all_readers():
    def products(x, y, w):
        rows = x * 2
        return torch.mm(F.pad(rows.t(), (0, 0, 0, 3)), y), torch.mm(F.pad(rows, (0, 3)), w)

    tensors = torch.randn(4, 5), torch.randn(4, 6), torch.randn(8, 2)
    program = trace(products, *tensors)
    new = program.copy()
    turn_after_padding(new)
    new = new.finish()
    new.check()
    pads = [node for node in new.calls if node.target is torch.ops.aten.constant_pad_nd.default]
    assert [pads_of(node) for node in pads] == [[0, 3]]
    assert len(pads[0].users) == 2
    assert_same(new.run(*tensors), program.run(*tensors))


def test_a_padding_that_also_widens_is_left_alone():
    program = trace(lambda x: (torch.ops.aten.constant_pad_nd(x.t(), [0, 1, 0, 3]),), torch.randn(4, 5))
    new = program.copy()
    turn_after_padding(new)
    assert [node.target for node in new.calls] == [node.target for node in program.calls]
