"""Other functions where AOTAutograd traces a joint graph and Inductor rewrites it."""

import pytest
import torch
from torch._functorch._aot_autograd import graph_compile
from torch._inductor import compile_fx

from memopt.torch_compat.joint_graphs import joint_graphs_by


def test_joint_graphs_are_traced_and_rewritten_by_what_is_given():
    seen = []

    def around(name):
        def made(own):
            return lambda *args, **options: seen.append(name) or own(*args, **options)

        return made

    torch._dynamo.reset()
    x = torch.randn(3, requires_grad=True)
    with joint_graphs_by(around("trace"), around("rewrite")):
        torch.compile(lambda x: x.sin().sum(), backend="aot_eager")(x).backward()
        assert seen == ["trace"]
        compile_fx._recursive_joint_graph_passes(torch.fx.symbolic_trace(lambda x: (x + 1,)))
    assert seen == ["trace", "rewrite"]


def test_torch_s_own_are_back_in_their_places_after_an_error():
    own = graph_compile.aot_dispatch_autograd_graph, compile_fx._recursive_joint_graph_passes
    with pytest.raises(ValueError), joint_graphs_by(lambda own: "a", lambda own: "b"):
        assert graph_compile.aot_dispatch_autograd_graph == "a"
        raise ValueError
    assert (graph_compile.aot_dispatch_autograd_graph, compile_fx._recursive_joint_graph_passes) == own
