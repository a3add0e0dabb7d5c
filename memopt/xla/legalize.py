"""Which operators of a graph have a lowering, and how those without one are written out in others that have."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from memopt.errors import first_line
from memopt.graph.propagation import fake_mode
from memopt.program import is_random, source_line
from memopt.torch_compat import pytree
from memopt.torch_compat.decompositions import decomposition_of, is_written_out
from memopt.torch_compat.fake_tensors import FakeTensor
from memopt.torch_compat.fx_graphs import make_fx
from memopt.torch_compat.operators import OpOverload
from memopt.torch_compat.torchax_import import without_renaming
from memopt.xla import (  # noqa: F401  for what they enter in the table
    attention,
    convolution,
    creation,
    elementwise,
    indexing,
    losses,
    normalization,
    pooling,
    random,
    reductions,
    shapes,
)
from memopt.xla.table import LOWERINGS, LowerError

# Operators that check something or do nothing: they have no value that a later operator reads.
_SILENT = (
    "aten._assert_tensor_metadata.default",
    "aten._assert_async.msg",
    "aten.sym_constrain_range_for_size.default",
)
_DEPTH = 8
# What torchax computes otherwise than PyTorch, by PyTorch's own operator samples.
_WRONG = (torch.ops.aten.polygamma.default,)


@functools.cache
def _torchax() -> Any:
    """Torchax's table of operators, without what its import does to PyTorch.

    It would rename PyTorch's spare device to "jax", which Dynamo then asks for its streams, and switch off PyTorch's
    own fast path of attention: neither is undone by anyone.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    with without_renaming():
        import torchax
        from torchax.ops import ops_registry
    torch.backends.mha.set_fastpath_enabled(fast)
    torchax.default_env()  # enters the operators
    return ops_registry.all_aten_ops


def torchax_lowering(target: Any) -> Callable[..., Any] | None:
    """The function of torchax for an overload, where it has one that is a plain JAX function."""
    entry = _torchax().get(target) or _torchax().get(target.overloadpacket)
    if entry is None or not entry.is_jax_function or entry.needs_env or target in _WRONG:
        return None
    function: Callable[..., Any] = entry.func
    return function


def where(node: fx.Node) -> str:
    """The operator and its source line, for messages."""
    name = str(node.target) if node.op == "call_function" else node.name
    return f"{name} ({source_line(node) or 'source unknown'})"


def legalize(module: fx.GraphModule) -> fx.GraphModule:
    """Return an equal graph whose every call has a lowering.

    Each operator is taken from memopt's own table, else written out by PyTorch's own decomposition, else taken from
    torchax. Names of nodes are kept where they are not written out.

    Raises:
        LowerError: an operator has none of these; the line names it and its source line.
    """
    graph = fx.Graph()
    mapping: dict[fx.Node, Any] = {}
    for node in module.graph.nodes:
        if node.op == "call_function":
            _enter(graph, node, mapping, node, 0)
        elif node.op == "output":
            result = graph.output(fx.map_arg(node.args[0], lambda n: mapping[n]))
            result.meta = dict(node.meta)
        else:
            mapping[node] = graph.node_copy(node, lambda n: mapping[n])
            mapping[node].meta = dict(node.meta)
    graph.eliminate_dead_code()
    return fx.GraphModule(module, graph)


def _enter(graph: fx.Graph, node: fx.Node, mapping: dict[fx.Node, Any], top: fx.Node, depth: int) -> None:
    """Copy a node, or what it is written out in, to the graph; `top` is the node of the program that it is part of."""
    if node.target is operator.getitem and isinstance(mapping[node.args[0]], (tuple, list)):  # type: ignore[index]
        mapping[node] = mapping[node.args[0]][node.args[1]]  # type: ignore[index]
        return
    if str(node.target) in _SILENT:
        return
    if _has_lowering(node):
        mapping[node] = copied = graph.node_copy(node, lambda n: mapping[n])
        copied.meta = dict(node.meta)
        return
    try:
        _write_out(graph, node, mapping, top, depth)
    except LowerError:
        if not isinstance(node.target, OpOverload) or is_random(node) or not torchax_lowering(node.target):
            raise
        mapping[node] = copied = graph.node_copy(node, lambda n: mapping[n])
        copied.meta = dict(node.meta)


def _write_out(graph: fx.Graph, node: fx.Node, mapping: dict[fx.Node, Any], top: fx.Node, depth: int) -> None:
    written = _written_out(node) if depth < _DEPTH else None
    if written is None:
        part = "" if node is top else f": it is written out with {node.target}"
        raise LowerError(f"{where(top)} has no form under XLA{part}")
    given = iter(mapping[leaf] for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, fx.Node))
    inner: dict[fx.Node, Any] = {}
    for step in written.graph.nodes:
        if step.op == "placeholder":
            inner[step] = next(given)
        elif step.op == "output":
            mapping[node] = fx.map_arg(step.args[0], lambda n: inner[n])
        elif step.op == "get_attr":
            raise LowerError(f"{where(top)} has no form under XLA: it is written out with a constant")
        else:
            step.meta = {**step.meta, "stack_trace": node.meta.get("stack_trace"), "phase": node.meta.get("phase")}
            _enter(graph, step, inner, top, depth + 1)


def _has_lowering(node: fx.Node) -> bool:
    if node.target is operator.getitem or node.target in LOWERINGS:
        return True
    if not isinstance(node.target, OpOverload) or is_random(node):
        return False  # torchax draws from keys of its own, some of them constant
    return not is_written_out(node.target) and torchax_lowering(node.target) is not None


def _written_out(node: fx.Node) -> fx.GraphModule | None:
    """The operator as a graph of simpler ones, of its tensor operands in order."""
    target: Any = node.target
    if not isinstance(target, OpOverload) or not is_written_out(target) or is_random(node):
        return None
    function = decomposition_of(target)
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    nodes = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]

    def call(*values: Any) -> Any:
        rest = iter(values)
        args, kwargs = pytree.tree_unflatten(
            [next(rest) if isinstance(leaf, fx.Node) else leaf for leaf in leaves], spec
        )
        found = function(*args, **kwargs)
        return tuple(found) if isinstance(found, tuple) else found  # a named tuple would be a call of its own

    values = [leaf.meta["val"] for leaf in nodes]
    try:
        with _mode_of(values), torch.no_grad():
            written: fx.GraphModule = make_fx(call, tracing_mode="real", decomposition_table={target: function})(
                *values
            )
    except Exception as error:
        raise LowerError(f"{where(node)} has no form under XLA: {first_line(error)}") from error
    for step in written.graph.nodes:
        if step.target is target:
            return None  # the decomposition leaves this form of the operator as it is
    written.graph.eliminate_dead_code()
    return written


def _mode_of(values: list[Any]) -> Any:
    for value in pytree.tree_leaves(values):
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return fake_mode(fx.GraphModule({}, fx.Graph()))
