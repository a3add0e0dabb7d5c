"""Values of a graph's nodes, found by running it on fake tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from memopt.graph import equal_calls, fake_calls
from memopt.torch_compat import pytree
from memopt.torch_compat.fake_tensors import FakeTensor, FakeTensorMode


class ProgramError(RuntimeError):
    """A program breaks the specification of the representation: a fault of the pass that returned it."""


def fake_mode(graph_module: fx.GraphModule) -> FakeTensorMode:
    """The fake mode of the graph's values, or a new one when no value is fake."""
    for node in graph_module.graph.nodes:
        for leaf in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(leaf, FakeTensor):
                return leaf.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


def run_fake(graph_module: fx.GraphModule) -> dict[fx.Node, Any]:
    """Run the graph on the fake values of its placeholders; return every node's value, aliasing included.

    A node that was run before on operands of the same layout keeps its value, so that a rewrite costs what it changed;
    of equal calls, as those of blocks that repeat, one is run.

    Raises:
        ProgramError: an operation refuses its operands; the message names the node.
    """
    mode = fake_mode(graph_module)
    cached = mode.cache_enabled
    values: dict[fx.Node, Any] = {}
    try:
        with mode, torch.no_grad():
            for node in graph_module.graph.nodes:
                if node.op == "placeholder":
                    values[node] = node.meta["val"]
                elif node.op == "get_attr":
                    values[node] = getattr(graph_module, str(node.target))
                elif node.op == "call_function":
                    found, values[node] = fake_calls.unchanged(node, values, mode)
                    if found:
                        continue
                    call = fake_calls.call_of(node, values, mode)
                    found, values[node] = fake_calls.known(node, call)
                    if found:
                        continue
                    key = fake_calls.kind_of(call)
                    layouts = None if key is None else equal_calls.known(mode, key)
                    if layouts is not None:
                        values[node] = layouts.made(mode, call.operands)
                    else:
                        values[node] = _run(node, values, mode, cached)
                        if key is not None:
                            equal_calls.learn(mode, key, call.operands, values[node])
                    fake_calls.keep(node, call, values[node])
    finally:
        mode.cache_enabled = cached
    return values


def _run(node: fx.Node, values: Mapping[fx.Node, Any], mode: FakeTensorMode, cached: bool) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
    # A convolution's layout depends on settings of oneDNN and cuDNN that the cache does not know.
    mode.cache_enabled = cached and node.target is not torch.ops.aten.convolution.default
    try:
        return fake_calls.run(node.target, args, kwargs)
    except Exception as error:
        raise ProgramError(f"{node.name}: {type(error).__name__}: {error}") from error


def propagate(graph_module: fx.GraphModule, *, refresh: bool = False) -> None:
    """Fill in `meta["val"]` of nodes that lack it; with `refresh`, of every call node."""
    for node, value in run_fake(graph_module).items():
        if node.op == "call_function" and (refresh or "val" not in node.meta):
            node.meta["val"] = value
