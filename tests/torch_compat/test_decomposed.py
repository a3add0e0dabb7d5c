"""What Inductor makes of operators when it writes them out."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memopt.torch_compat.decomposed import decomposed

aten = torch.ops.aten


def call(target, *shapes):
    graph = torch.fx.Graph()
    with FakeTensorMode():
        operands = [graph.placeholder(f"x{index}") for index in range(len(shapes))]
        for node, shape in zip(operands, shapes, strict=True):
            node.meta["val"] = torch.empty(shape)
        return graph.call_function(target, tuple(operands))


def test_what_is_written_out_has_a_value_and_what_is_not_has_none():
    with FakeTensorMode() as mode:
        node = call(aten.silu.default, (2, 3))
        node.args[0].meta["val"] = mode.from_tensor(torch.ones(2, 3))
        assert tuple(decomposed(node).shape) == (2, 3)
    assert decomposed(call(aten.mm.default, (2, 3), (3, 4))) is None


def test_what_fails_on_fake_tensors_has_none():
    node = call(aten.silu.default, (2, 3))
    node.args[0].meta["val"] = "no tensor"
    assert decomposed(node) is None
