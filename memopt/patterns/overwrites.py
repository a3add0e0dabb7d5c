"""What an engine writes over with a node's result, where nothing reads it any more."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from memopt.patterns.product_sums import ADD_PRODUCT
from memopt.patterns.write_over import WRITE_OVER
from memopt.program import is_any_view

aten = torch.ops.aten


def written_over(node: fx.Node) -> fx.Node | None:
    """The value that the node's result takes the place of.

    A sum so far, a table that rows are added to, or what `write_over` names.
    """
    return sum_so_far(node) or _first_operand(node, WRITE_OVER) or _table_with_rows_added(node)


def sum_so_far(node: fx.Node) -> fx.Node | None:
    """The sum that the node adds a product to, where nothing else reads that: engines write over it."""
    total = _first_operand(node, ADD_PRODUCT)
    return total if total is not None and len(total.users) == 1 else None


def _table_with_rows_added(node: fx.Node) -> fx.Node | None:
    """Of rows put into a table the table, if nothing else reads that but what makes the rows, of rows of its own."""
    table = _first_operand(node, aten.index_put.default)
    if table is None:
        return None
    return table if all(user is node or _is_row_of(user, node) for user in table.users) else None


def _first_operand(node: fx.Node, target: Any) -> fx.Node | None:
    """What a call of `target` has as its first operand, if that is made in the same phase, and no view."""
    value = node.args[0] if node.target is target else None
    if not isinstance(value, fx.Node) or value.op != "call_function" or is_any_view(value):
        return None
    return value if value.meta.get("phase") is node.meta.get("phase") else None


def _is_row_of(user: fx.Node, put: fx.Node) -> bool:
    """Whether the user picks rows of the table to which something is added before they are put back."""
    if user.target is not aten.index.Tensor or len(user.users) != 1:
        return False
    (added,) = user.users
    return put.args[2] is added and list(added.users) == [put]
