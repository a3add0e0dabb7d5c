"""What library calls of generated code take beyond their results: looked up, or measured together afterwards."""

from __future__ import annotations

import gc
import weakref

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memopt.inductor.workspace import MeasuredWorkspace
from memopt.memory.cost.table import CostTable, OperatorCost

aten = torch.ops.aten


class Table:
    """Knows products, and learns what else it is asked for."""

    def __init__(self):
        self.known_targets, self.learned, self.asked = {aten.mm.default}, [], []

    def known(self, node):
        self.asked.append((node.target, node.args, dict(node.kwargs)))
        return OperatorCost(0.0, 64, 0, True) if node.target in self.known_targets else None

    def learn(self, nodes):
        shapes = [[item.meta["val"].shape for item in node.all_input_nodes] for node in nodes]
        self.learned.append([(node.target, found) for node, found in zip(nodes, shapes, strict=True)])

    def measure(self, node):
        return 640


def test_what_is_known_is_told_at_once_and_what_is_not_is_measured_together():
    table = Table()
    find = MeasuredWorkspace(table)
    with FakeTensorMode():
        x = torch.empty(4, 4)
        assert find(aten.mm.default, (x, x), {}, x) == 64
        first = find(aten.addmm.default, (x, x, torch.empty(4, 2).t()), {"beta": 0}, x)
        second = find(aten.convolution.default, (x, x), {"stride": [1], "bias": None}, x)
        assert table.learned == []
        assert first() == 640 and second() == 640
    assert table.learned == [[
        (aten.addmm.default, [(4, 4), (2, 4)]),  # the same tensor is one operand
        (aten.convolution.default, [(4, 4)]),
    ]]  # fmt: skip
    assert table.asked[1][2] == {"beta": 0}


def test_what_waits_to_be_measured_holds_none_of_the_codes_tensors():
    find = MeasuredWorkspace(Table())
    with FakeTensorMode():
        x = torch.empty(4, 4)
        y = torch.empty(4, 4)
        gone = weakref.ref(x.untyped_storage()), weakref.ref(y)
        later = find(aten.addmm.default, (x, x, x), {}, y)
        del x, y
    gc.disable()
    try:
        assert gone[0]() is None and gone[1]() is None
    finally:
        gc.enable()
    assert later() == 640


def test_calls_that_write_or_only_make_room_take_nothing():
    table = Table()
    find = MeasuredWorkspace(table)
    with FakeTensorMode():
        x = torch.empty(4, 4)
    assert find(aten.add_.Tensor, (x, x), {}, x) == 0 and find(torch.relu, (x,), {}, x) == 0
    assert find(aten.empty_strided.default, ((4, 4), (4, 1)), {}, x) == 0 and table.asked == []


def test_calls_are_looked_up_as_graphs_have_them():
    """Generated code gives by name, and with their usual values, what a captured graph gives by position."""
    table = Table()
    find = MeasuredWorkspace(table)
    with FakeTensorMode():
        x, w = torch.empty(2, 3, 8, 8), torch.empty(4, 3, 3, 3)
        names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups", "bias")
        values = ((1, 1), (0, 0), (1, 1), False, (0, 0), 1, None)
        find(aten.convolution.default, (x, w), dict(zip(names, values, strict=True)), x)
        find(aten.addmm.default, (x, x, x), {"alpha": 1, "beta": 1}, x)
        find(aten.sum.dim_IntList, (x, [0], False), {"dtype": None}, x)
        find(aten.sum.dim_IntList, (x, [0], True), {}, x)
    (_, first, named), (_, second, none), (_, third, nothing), (_, fourth, _) = table.asked
    assert first[2:] == (None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1) and named == {}
    assert len(second) == 3 and none == {}
    assert third[1:] == ([0],) and nothing == {} and fourth[1:] == ([0], True)


def test_a_real_table_measures_what_waits():
    find = MeasuredWorkspace(CostTable())
    with FakeTensorMode():
        x = torch.empty(64, 48)
        taken = find(aten.sort.default, (x,), {}, aten.sort.default(x))
    assert not isinstance(taken, int) and taken() >= 0
