"""Composite operators of exported programs."""

import torch
from torch import nn

from memopt.torch_compat.exporting import composites, written_out


class Net(nn.Module):
    def forward(self, x):
        return torch.ops.aten.silu(torch.ops.aten.layer_norm(x, [4]))


def targets(exported):
    return {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}


def test_composite_operators_are_written_out_and_others_kept():
    exported = torch.export.export(Net(), (torch.ones(2, 4),))
    table = composites()
    assert torch.ops.aten.layer_norm.default in table
    out = written_out(exported, table)
    assert "aten.native_layer_norm.default" in targets(out) and "aten.layer_norm.default" not in targets(out)
    assert "aten.silu.default" in targets(out), "an operator that is none of several is kept"
    x = torch.arange(8.0).reshape(2, 4)
    torch.testing.assert_close(out.module()(x), Net()(x))
