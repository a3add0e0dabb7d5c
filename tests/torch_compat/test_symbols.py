"""Symbols of sizes, and what they are in one call."""

from __future__ import annotations

import torch
from torch._dynamo.testing import CompileCounter

from memopt.torch_compat.symbols import Sized, hints_of, is_symbolic, symbols_of


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
