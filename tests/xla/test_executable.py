"""Executables of XLA's on PyTorch's tensors: results, arguments that are let go of, memory as the compiler says."""

import importlib.util

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

pytest.importorskip("jax")
if importlib.util.find_spec("torchax") is None:
    pytest.skip("needs torchax", allow_module_level=True)

from memopt.xla.executable import Executable, Memory, attributes_to_inputs

CPU = torch.device("cpu")


def graph(function, *given):
    """A functional graph whose results are a tuple."""
    return make_fx(function, tracing_mode="fake")(*given)


def test_a_run_gives_torch_s_results_and_empties_the_list_of_arguments():
    x, y = torch.randn(8, 16), torch.randn(16, 4)
    run = Executable(graph(lambda x, y: ((x @ y).tanh(), x), x, y), CPU)
    given = [x, y]
    found, passed = run(given)
    assert given == [] and passed is x
    torch.testing.assert_close(found, (x @ y).tanh())


def test_memory_is_what_arguments_results_and_all_between_take():
    assert Memory(3, 4, 5).peak == 12
    x = torch.randn(64, 64)
    run = Executable(graph(lambda x: ((x @ x) @ x,), x), CPU)
    (memory,) = run.memories
    assert (memory.arguments, memory.outputs) == (x.nbytes, x.nbytes) and memory.temporaries >= x.nbytes
    peak, results = run.usage(resident=())
    assert (peak, results) == (memory.peak, x.nbytes)
    assert run.usage(resident=run.argument_names)[0] == memory.outputs + memory.temporaries
    assert run.result_bytes == [x.nbytes] and run.bytes_of([]) == 0


def test_pieces_free_arguments_on_their_way():
    def function(x):
        for _ in range(4):
            x = (x @ x).tanh()
        return (x,)

    x = torch.eye(64)
    whole, pieces = (Executable(graph(function, x), CPU, size=size) for size in (0, 2))
    assert len(pieces.memories) > len(whole.memories) == 1
    torch.testing.assert_close(pieces([x.clone()]), whole([x.clone()]))


def test_tensors_among_attributes_become_the_last_inputs():
    held = torch.arange(3.0)
    traced = make_fx(lambda x: (x + held,))(torch.ones(3))  # a tensor that it has not been given
    module, values = attributes_to_inputs(traced)
    assert len(module.graph.find_nodes(op="placeholder")) == 2 and not module.graph.find_nodes(op="get_attr")
    assert [value.tolist() for value in values.values()] == [held.tolist()]
    torch.testing.assert_close(module(torch.ones(3), *values.values()), (held + 1,))
