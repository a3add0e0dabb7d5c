"""Which kernels Inductor fuses, by a policy of one's own."""

import torch

from memopt.torch_compat.inductor_compile import compile_graph, compile_traced
from memopt.torch_compat.inductor_fusion import InductorChoices, fused_by, nodes_being_lowered
from tests.inductor.test_peak_lower_bound import needs_compiler


class Apart(InductorChoices):
    """Fuses nothing, and notes what is lowered."""

    def __init__(self):
        self.seen = set()

    def can_fuse(self, *args, **options):
        self.seen.update(node.name for node in nodes_being_lowered())
        return False


@needs_compiler
def test_the_policy_is_asked_within_the_block():
    x, policy = torch.randn(4, 64), Apart()
    # Two sums along different dimensions of one value: kernels of their own, or one.
    graph = torch.fx.symbolic_trace(lambda x: (x.sin().sum(0), x.sin().sum(1)))
    with fused_by(policy):
        run = compile_graph(graph, [x], compile_traced, {"fx_graph_cache": False})
    for found, expected in zip(run(x), (x.sin().sum(0), x.sin().sum(1)), strict=True):
        torch.testing.assert_close(found, expected)
    assert any("sum" in name for name in policy.seen)
