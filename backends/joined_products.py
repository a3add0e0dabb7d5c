"""Products of one matrix with several weights as one product, where the weights lie one after the other in memory.

Query, key and value of attention are such products. Each alone is too small to fill a large device; together they take
little more time than one. The weights are not copied for it: `memopt.compilation.layout` moved the parameters together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from memopt.graph.rewrite import add_constant, erase_unused, forget_inplace
from memopt.patterns.products import Product, adjacent, products_of_one
from memopt.program import Program, ProgramError

aten = torch.ops.aten


def _joinable(program: Program) -> list[list[Product]]:
    groups = products_of_one(program)
    return [group for group in groups if adjacent([program.state[product.weight.name] for product in group])]


def read_by_products(program: Program) -> frozenset[str]:
    """Names of the inputs whose present places or values `join_products` reads."""
    return frozenset(
        item.name
        for group in _joinable(program)
        for product in group
        for item in (product.weight, product.bias)
        if item is not None
    )


def join_products(program: Program) -> Program:
    """The program with each such group as one product; the given one where there is none, or where a reader objects."""
    new = program.copy()
    groups = _joinable(new)
    for group in groups:
        new = _joined(new, group)
    if not groups:
        return program
    forget_inplace(new.graph)
    try:
        new = new.finish()
    except ProgramError:  # a view of a result that is a matrix of its own no longer
        return program
    same = all(_strides(a) == _strides(b) for a, b in zip(new.output_nodes, program.output_nodes, strict=True))
    return new if same else program


def _strides(node: Any) -> Any:
    return node.meta["val"].stride() if isinstance(node, fx.Node) else None


def _joined(program: Program, group: Sequence[Product]) -> Program:
    values = [program.state[product.weight.name] for product in group]
    rows = [value.shape[0] for value in values]
    whole = values[0].detach().as_strided((sum(rows), values[0].shape[1]), values[0].stride())
    first = group[0].node
    weight, program = add_constant(program, f"{group[0].weight.name}_joined", whole)
    operands: list[Any] = []
    if group[0].bias is not None:
        biases = torch.cat([program.state[product.bias.name] for product in group if product.bias is not None])
        bias, program = add_constant(program, f"{group[0].bias.name}_joined", biases)
        operands.append(bias)
    graph = program.graph
    with graph.inserting_before(first):
        turned = graph.call_function(aten.t.default, (weight,))
        whole_node = graph.call_function(first.target, (*operands, first.args[-2], turned))  # type: ignore[arg-type]
        whole_node.meta = {key: value for key, value in first.meta.items() if key != "val"}
        parts, start = [], 0
        for count in rows:
            parts.append(graph.call_function(aten.slice.Tensor, (whole_node, 1, start, start + count)))
            start += count
    for product, part in zip(group, parts, strict=True):
        product.node.replace_all_uses_with(part)
    erase_unused(graph, [product.node for product in group])
    return program
