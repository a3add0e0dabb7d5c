"""Replace a node by one of the same values laid out otherwise, where nothing sees the layout."""

from __future__ import annotations

import torch
from torch import fx

from memopt.graph.propagation import fake_mode
from memopt.graph.rewrite import erase_unused
from memopt.program import Program

aten = torch.ops.aten

_VIEWS = frozenset({
    aten.view.default, aten._unsafe_view.default, aten.permute.default, aten.transpose.int, aten.t.default,
    aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
})  # fmt: skip


def layout_is_unseen(program: Program, node: fx.Node, value: torch.Tensor) -> bool:
    """Whether the node's value may be laid out like `value`: whatever reads it sees what it saw.

    That is so through views, up to copies into a contiguous layout, or up to views that come out laid out as before.
    """
    if value.stride() == node.meta["val"].stride():
        return True
    outputs = set(program.output_nodes)
    for reader in node.users:
        if _is_contiguous_copy(reader):
            continue
        if reader.target not in _VIEWS or reader in outputs:
            return False
        try:
            seen = _seen(program, reader, value)
        except (RuntimeError, ValueError):  # no such view of the other layout exists
            return False
        if not layout_is_unseen(program, reader, seen):
            return False
    return True


def replace_relaid(program: Program, node: fx.Node, stands: fx.Node) -> None:
    """Let `stands` take the place of a node of the same shape whose layout is unseen, and erase the node.

    Views that are laid out otherwise become new nodes; copies that only made the layout contiguous go.
    """
    superseded: list[fx.Node] = []
    _replace(program, node, stands, superseded)
    for old in superseded:
        program.graph.erase_node(old)
    operands = node.all_input_nodes
    program.graph.erase_node(node)
    erase_unused(program.graph, operands)


def _replace(program: Program, node: fx.Node, stands: fx.Node, superseded: list[fx.Node]) -> None:
    """Replace the node in all its readers, and collect those of them that are replaced too, last one first."""
    value, outputs = stands.meta["val"], set(program.output_nodes)
    for reader in list(node.users) if value.stride() != node.meta["val"].stride() else []:
        if _is_contiguous_copy(reader):
            if value.is_contiguous() and reader not in outputs:
                reader.replace_all_uses_with(stands)
                superseded.append(reader)
            continue
        seen = _seen(program, reader, value)
        if seen.stride() != reader.meta["val"].stride():
            with program.graph.inserting_before(reader):
                arguments = (stands, *reader.args[1:])
                view = program.graph.call_function(reader.target, arguments, reader.kwargs)  # type: ignore[arg-type]
            view.meta = {**reader.meta, "val": seen}
            _replace(program, reader, view, superseded)
            superseded.append(reader)
    node.replace_all_uses_with(stands, delete_user_cb=lambda user: user not in superseded)


def _seen(program: Program, view: fx.Node, value: torch.Tensor) -> torch.Tensor:
    """What a view of one tensor shows when that has another layout."""
    with fake_mode(program.graph_module):
        return view.target(value, *view.args[1:], **view.kwargs)  # type: ignore[operator,no-any-return]


def _is_contiguous_copy(node: fx.Node) -> bool:
    return node.target is aten.clone.default and node.kwargs.get("memory_format") is torch.contiguous_format
