"""How Inductor runs an operation: in the kernels of its readers, by a kernel of its own, or by a library."""

import pytest
import torch

from memopt.inductor.kinds import is_inlined, is_library_call, kinds_of
from memopt.program import is_any_view
from tests.support import capture

aten = torch.ops.aten
KINDS = {
    "in its reader's": (lambda x: x.sin(), aten.sin.default, True, False),
    "a kernel of its own": (lambda x: x.sum(1), aten.sum.dim_IntList, False, False),
    "a view": (lambda x: x.permute(1, 0) + 1, aten.permute.default, False, False),
    "a product": (lambda x: x @ x, aten.mm.default, False, True),
    "a copy that no kernel makes": (
        lambda x: aten.slice_copy.Tensor(x, 0, 1, 3) + 1,
        aten.slice_copy.Tensor,
        False,
        True,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_operation_is_of_one_kind(kind):
    function, target, inlined, library = KINDS[kind]

    class Module(torch.nn.Module):
        def forward(self, x):
            return function(x)

    program = capture(Module(), torch.randn(4, 4))
    (node,) = [node for node in program.calls if node.target is target]
    assert (is_inlined(node), is_library_call(node)) == (inlined, library)


def test_all_nodes_are_asked_at_once():
    class Module(torch.nn.Module):
        def forward(self, x):
            y = (x @ x).sin().view(-1)
            return torch.ops.aten.slice_copy.Tensor(y, 0, 1, 3), y.sum(), torch.topk(y, 2)

    nodes = capture(Module(), torch.ones(4, 4)).graph.nodes
    view, inlined, calls = kinds_of(nodes)
    assert view == {node: is_any_view(node) for node in nodes}
    assert inlined == {node: node.op == "call_function" and is_inlined(node) for node in nodes}
    assert calls == {node for node in nodes if is_library_call(node)} and len(calls) == 3
