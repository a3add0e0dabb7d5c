"""Symbols of sizes, and what they are in one call."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from memopt.torch_compat.symbols import Sized, grows, grows_everywhere, hints_of, is_symbolic, symbols_of


@pytest.mark.parametrize(
    ("size", "monotone"),
    [
        (lambda a, b: a * b + 3, True),
        (lambda a, b: (a - 1) * b * b, True),
        (lambda a, b: (a * b) // 4, True),
        (lambda a, b: 64 - a, False),
        (lambda a, b: a * b - a, False),
        (lambda a, b: 64 // a, False),
        (lambda a, b: a % 8, False),
        (lambda a, b: 7, True),
    ],
)
def test_which_sizes_grow_with_their_symbols(size, monotone):
    seen = []

    def backend(module, inputs):
        a, b, *_ = [value for value in inputs if isinstance(value, torch.SymInt)]
        seen.append(grows(size(a, b)))
        return module.forward

    torch._dynamo.reset()
    torch.compile(lambda x: x * x.shape[0] * x.shape[1], backend=backend, dynamic=True)(torch.ones(5, 13))
    assert seen[0] is monotone


def test_symbols_are_found_by_position_and_values_sized():
    seen = []

    def backend(module, inputs):
        fakes = [node.meta["example_value"] for node in module.graph.nodes if node.op == "placeholder"]
        symbols, hints = symbols_of(inputs), hints_of(inputs)
        assert is_symbolic(inputs) and not is_symbolic([torch.ones(2)])
        doubled = {symbol: 2 * size for symbol, size in hints.items()}
        sized = Sized(doubled)(fakes)
        seen.append((list(symbols), [tuple(v.shape) for v in sized if isinstance(v, torch.Tensor)]))
        return CompileCounter()(module, inputs)

    torch._dynamo.reset()
    torch.compile(lambda x: x * 2, backend=backend, dynamic=True)(torch.ones(5, 3))
    (places, shapes), *_ = seen
    assert len(places) == 2 and (10, 6) in shapes


def test_graphs_of_which_all_tensors_grow():
    def graph(size):
        found = []

        def backend(module, example_inputs):
            found.append(module)
            return module.forward

        torch._dynamo.reset()
        torch.compile(lambda x: torch.zeros(size(x.shape[0])) + 1, backend=backend, dynamic=True)(torch.ones(5))
        for node in found[0].graph.nodes:
            node.meta["val"] = node.meta.get("example_value")
        return found[0]

    assert grows_everywhere(graph(lambda n: n + 1))
    assert not grows_everywhere(graph(lambda n: 64 - n))
