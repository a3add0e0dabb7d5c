"""Joint graphs partitioned by torch."""

import torch

from memopt.torch_compat.min_cut import min_cut, partition_at
from tests.passes.build import capture_joint

aten = torch.ops.aten


def joint():
    x = torch.randn(4, 4, requires_grad=True)
    program = capture_joint(lambda x: (x.sin().exp() @ x).sum(), x)
    return program.graph_module


def targets(module):
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def saved(forward, outputs):
    return [node.name for node in forward.graph.output_node().args[0][outputs:]]


def test_forward_saves_what_it_is_told_to():
    module = joint()
    before = str(module.graph)
    (sine,) = (node for node in module.graph.nodes if node.target is aten.sin.default)
    x = next(node for node in module.graph.nodes if node.op == "placeholder")
    forward, backward = partition_at(module, [x, sine], 1, [])
    assert saved(forward, 1) == [x.name, sine.name] and str(module.graph) == before
    assert aten.exp.default in targets(backward) and aten.sin.default not in targets(backward)


def test_torch_s_own_cut_recomputes_what_is_cheap():
    module = joint()
    inputs = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    forward, backward = min_cut(module, inputs, num_fwd_outputs=1)
    assert len(saved(forward, 1)) <= 2 and aten.cos.default in targets(backward)
