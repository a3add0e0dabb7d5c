"""How Inductor runs an operation: in the kernels of its readers, by a kernel of its own, or by a library."""

import pytest
import torch

from memopt.inductor.kinds import is_inlined, is_library_call
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
