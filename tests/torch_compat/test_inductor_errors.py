"""What Inductor raises for a graph that it has no code for."""

import pytest
import torch

from memopt.torch_compat.inductor_compile import compile_graph, compile_traced
from memopt.torch_compat.inductor_errors import InductorError
from tests.inductor.test_peak_lower_bound import needs_compiler


@needs_compiler
def test_an_error_of_its_lowering_is_one(monkeypatch):
    def lower(module, inputs, **options):
        for node in module.graph.nodes:
            if node.target is torch.ops.aten.sin.default:
                node.target = lambda x: x.no_such_thing()
        return compile_traced(module, inputs, **options)

    x = torch.ones(3)
    graph = torch.fx.symbolic_trace(lambda x: (x.sin(),))
    with pytest.raises(InductorError):
        compile_graph(graph, [x], lower, {"fx_graph_cache": False})
