"""Outputs of a graph that show one tensor with and without gradients: their views are made outside of the graph.

AOTAutograd makes such outputs anew from another one, and takes views that go by that tensor for views that go by its
base (`y.t(), y.detach().t()`), lets a view that was made without gradients record them, and hands two outputs to
autograd that Inductor has made one tensor (`y[:, :4], y.detach()`), which then has no gradient. So the graph returns
the tensor alone, and what shows it is made of that by the very operations that the model calls. The same is done with
several that show one tensor without gradients: onnxruntime and XLA would return each in memory of its own. Views of an
input AOTAutograd makes itself, but not the pieces of a split: these would show a copy of an input that is written to.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from memopt.capture.dynamo_graph import name_of, storages_of, value_of, writes
from memopt.capture.export import CaptureError
from memopt.capture.overlap import may_overlap
from memopt.program import source_line
from memopt.torch_compat.dynamo import sets_grad_mode

# In-place methods that change what a tensor shows, or what autograd knows of it, not what is in it.
_RESHAPING = frozenset({
    "as_strided_", "detach_", "rename_", "requires_grad_", "resize_", "resize_as_", "set_", "squeeze_", "swapaxes_",
    "swapdims_", "t_", "transpose_", "unsqueeze_",
})  # fmt: skip

# `detach()` and `.data`.
_DETACHING = frozenset({"detach", "_get_data_attr"})

# From the node that makes a tensor's memory, that first, to a view of it.
_Chain = list[fx.Node]


def views_outside(graph_module: fx.GraphModule) -> Callable[[Sequence[Any]], list[Any]] | None:
    """Have a graph of Dynamo's return tensors in place of outputs that show them with and without gradients.

    Args:
        graph_module: edited where there are such outputs.

    Returns:
        Makes the graph's outputs of what it returns now; None where it was left as it is.

    Raises:
        CaptureError: a write gives gradients to one of several views whose tensor has others, or none.
    """
    end = graph_module.graph.output_node()
    outputs: list[Any] = list(end.args[0])  # type: ignore[arg-type]
    chains = _chains(graph_module.graph, [value for value in outputs if isinstance(value, fx.Node)])
    if not chains:
        return None
    kept: list[Any] = [value for value in outputs if value not in chains]
    kept += [base for base in dict.fromkeys(chain[0] for chain in chains.values()) if base not in kept]
    views = _views(graph_module, chains, kept, outputs)
    end.args = (tuple(kept),)
    graph_module.recompile()
    return views


def _chains(graph: fx.Graph, outputs: Sequence[fx.Node]) -> dict[fx.Node, _Chain]:
    """Which outputs are to be made outside, each with the views that lead to it."""
    makers: dict[int, fx.Node] = {}
    for node in graph.nodes:
        if isinstance(value_of(node), torch.Tensor):
            for storage in storages_of(node):
                makers.setdefault(storage, node)
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in dict.fromkeys(outputs):
        for storage in storages_of(node):
            groups.setdefault(makers[storage], []).append(node)
    chains: dict[fx.Node, _Chain] = {}
    for maker, group in groups.items():
        if maker.op in ("placeholder", "get_attr"):  # AOTAutograd goes by the input itself there
            pieces = {node: _chain(node, maker) for node in group}
            chains.update((node, chain) for node, chain in pieces.items() if any(map(_is_split, chain)))
            continue
        written = _written_apart(group, maker) if len(group) > 1 else None
        outside = written or _is_mixed(group) or _is_without_gradients(group) or any(map(_overlaps, group))
        maker = written or maker
        found = {node: _chain(node, maker) for node in group} if outside else {}
        if all(found.values()):
            chains.update((node, chain) for node, chain in found.items() if node is not maker)
    return chains


def _written_apart(group: Sequence[fx.Node], maker: fx.Node) -> fx.Node | None:
    """What `detach` has made and a write has given gradients, where all these outputs show it; None: there is none.

    Raises:
        CaptureError: some outputs show it, and others its memory with other gradients: none can be made of the other.
    """
    found: dict[fx.Node, fx.Node | None] = {}
    for node in group:
        cuts = [view for view in _chain(node, maker)[1:] if name_of(view) in _DETACHING]
        found[node] = cuts[-1] if cuts and value_of(node).requires_grad else None
    views = set(found.values())
    view = next((view for view in found.values() if view is not None), None)
    if view is not None and len(views) > 1:
        where = source_line(next(filter(writes, view.users), view)) or f"node {view.name}"
        raise CaptureError(
            f"{where}: writes what has a gradient to the result of detach(), whose memory another output shows with "
            "other gradients: write to a clone() of it"
        )
    return view


def _is_mixed(group: Sequence[fx.Node]) -> bool:
    """Whether some of these outputs, of one storage, hand gradients back, and others do not or are leaves."""
    values = [value_of(node) for node in group]
    passing = [value.requires_grad and value.grad_fn is not None for value in values]
    return (any(passing) and not all(passing)) or any(value.requires_grad and value.is_leaf for value in values)


def _is_without_gradients(group: Sequence[fx.Node]) -> bool:
    """Whether these are several, and none has a gradient: engines with memory of their own would tear them apart."""
    return len(group) > 1 and not any(value_of(node).requires_grad for node in group)


def _is_split(node: fx.Node) -> bool:
    """Whether the node makes several views at once."""
    return not isinstance(value_of(node), torch.Tensor)


def _overlaps(node: fx.Node) -> bool:
    """Whether the output shows an element twice: AOTAutograd would lay out its gradient so and lose a part."""
    return bool(value_of(node).requires_grad) and may_overlap(value_of(node))


def _chain(node: fx.Node, maker: fx.Node) -> _Chain:
    """The views from the maker to this node; empty where they cannot be made anew.

    What writes in between is left out: the memory has its last values when the graph has ended.
    """
    chain, (storage,) = [node], storages_of(maker)
    while chain[0] is not maker:
        first = chain[0]
        source = first.args[0] if first.args else None
        if not isinstance(source, fx.Node) or storages_of(source) != {storage} or name_of(first) in _RESHAPING:
            return []
        if any(operand is not source for operand in first.all_input_nodes) and not writes(first):
            return []
        chain[: 1 if writes(first) else 0] = [source]
    return chain


def _views(
    graph_module: fx.GraphModule, chains: dict[fx.Node, _Chain], kept: list[Any], outputs: list[Any]
) -> Callable[[Sequence[Any]], list[Any]]:
    """Makes the outputs of those that are kept, each view with or without gradients, as the model has it."""
    graph = fx.Graph()
    made = {value: graph.placeholder(f"kept_{index}") for index, value in enumerate(kept) if isinstance(value, fx.Node)}
    given = [isinstance(value, fx.Node) for value in kept]
    sources = {view: source for chain in chains.values() for source, view in itertools.pairwise(chain)}
    records = torch.is_grad_enabled()
    for node in graph_module.graph.nodes:
        mode = sets_grad_mode(node)
        if mode is not None:
            records = mode
        elif node in sources:
            graph.call_function(torch.set_grad_enabled, (records,))
            made[node] = graph.node_copy(node, lambda _, source=made[sources[node]]: source)  # type: ignore[misc]
    stand = {node: chain[-1] for node, chain in chains.items()}
    graph.output([made[stand.get(value, value)] if isinstance(value, fx.Node) else value for value in outputs])
    module = fx.GraphModule(graph_module, graph)

    def views(returned: Sequence[Any]) -> list[Any]:
        with torch.set_grad_enabled(torch.is_grad_enabled()):  # it is set in between
            return module(*itertools.compress(returned, given))  # type: ignore[no-any-return]

    return views
