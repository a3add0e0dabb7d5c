"""Inductor's pipeline, from a graph to a function."""

import pytest
import torch
from torch._inductor import ir
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import op_dtype_propagation_rules

from memopt.torch_compat.inductor_compile import (
    adds_one_by_one,
    code_cache_hits,
    compile_graph,
    compile_traced,
    modules_loaded_by,
    types_ruled_once,
)
from tests.inductor.test_peak_lower_bound import needs_compiler


@needs_compiler
def test_a_graph_is_compiled_as_its_caller_lowers_it_and_its_module_is_loaded_where_one_asks():
    lowered, loaded = [], []

    def lower(module, inputs, **options):
        lowered.append([node.name for node in module.graph.nodes if node.op == "call_function"])
        return compile_traced(module, inputs, **options)

    def around(load, path, attributes):
        loaded.append(path)
        return load()

    x, before = torch.randn(5), code_cache_hits()
    with modules_loaded_by(around):
        run = compile_graph(torch.fx.symbolic_trace(lambda x: (x.sin() + 1,)), [x], lower, {"fx_graph_cache": False})
        torch.testing.assert_close(run(x)[0], x.sin() + 1)
    assert lowered == [["sin", "add"]] and any(path.endswith(".py") for path in loaded)
    assert code_cache_hits() == before
    seen = len(loaded)
    compile_graph(torch.fx.symbolic_trace(lambda x: (x.cos() + 1,)), [x], lower, {"fx_graph_cache": False})(x)
    assert len(loaded) == seen, "outside of the block nobody is asked"


@pytest.mark.parametrize(("dtype", "one_by_one"), [(torch.float32, False), (torch.bool, True)])
def test_some_types_are_added_by_torch(dtype, one_by_one):
    assert adds_one_by_one(dtype) is one_by_one


@needs_compiler
def test_sizes_that_are_symbols_are_not_guarded_for_faster_code(monkeypatch):
    aligned, unguarded = [], []
    run = GraphLowering.run

    def lowered(self, *args):
        (rows,) = (x for x in self.sizevars.shape_env.var_to_range)
        before = len(self.sizevars.shape_env.guards)
        layout = ir.FixedLayout(torch.device("cpu"), torch.float32, [rows, rows], [rows, 1])
        aligned.append(ir.is_aligned_realized_tensor(ir.TensorBox.create(ir.Buffer(name="bias", layout=layout)), 8))
        unguarded.append(len(self.sizevars.shape_env.guards) == before)
        return run(self, *args)

    def lower(module, inputs, **options):
        return compile_traced(module, inputs, **options)

    def backend(module, inputs):
        return compile_graph(module, inputs, lower, {"fx_graph_cache": False})

    def call(x):
        return x[x.shape[0] - 1 :].sin() + 1

    monkeypatch.setattr(GraphLowering, "run", lowered)
    torch._dynamo.reset()
    compiled = torch.compile(call, backend=backend, dynamic=True)
    for rows in (16, 24, 5):
        torch.testing.assert_close(compiled(torch.ones(rows)), call(torch.ones(rows)))
    assert aligned == [False] and unguarded == [True]


@pytest.fixture
def learnt(monkeypatch):
    """What has learnt its rules for types, in order."""
    found, plain = [], DtypePropagationOpsHandler.__init__

    def learn(handler):
        found.append(handler)
        plain(handler)

    monkeypatch.setattr(DtypePropagationOpsHandler, "__init__", learn)
    return found


def test_rules_for_types_are_learnt_once_and_anew_where_one_was_added(monkeypatch, learnt):
    with types_ruled_once():
        assert DtypePropagationOpsHandler() is DtypePropagationOpsHandler() and len(learnt) == 1
        monkeypatch.setitem(op_dtype_propagation_rules, "of_a_test", op_dtype_propagation_rules["sin"])
        assert DtypePropagationOpsHandler().of_a_test is not None and len(learnt) == 2
        DtypePropagationOpsHandler()
        assert len(learnt) == 2
    DtypePropagationOpsHandler()
    assert len(learnt) == 3, "outside of the block it is as torch has it"


@needs_compiler
def test_rules_for_types_are_learnt_once_for_a_graph(learnt):
    x = torch.randn(7)
    made = torch.fx.symbolic_trace(lambda x: ((x.sin() + 1).exp() * 2,))
    run = compile_graph(made, [x], compile_traced, {"fx_graph_cache": False})
    torch.testing.assert_close(run(x)[0], (x.sin() + 1).exp() * 2)
    assert len(learnt) == 1
