"""What an engine writes over with a node's result, where nothing reads it any more."""

from __future__ import annotations

import torch
from torch import fx

from memopt.patterns.product_sums import sum_so_far
from memopt.patterns.write_over import place_of
from memopt.program import is_any_view

aten = torch.ops.aten


def written_over(node: fx.Node) -> fx.Node | None:
    """The value that the node's result takes the place of.

    A sum so far, a table that rows are added to, or what `write_over` names.
    """
    return sum_so_far(node) or place_of(node) or _table_with_rows_added(node)


def _table_with_rows_added(node: fx.Node) -> fx.Node | None:
    """Of rows put into a table the table, if nothing else reads that but what makes the rows, of rows of its own."""
    if node.target is not aten.index_put.default:
        return None
    table = node.args[0]
    if not isinstance(table, fx.Node) or table.op != "call_function" or is_any_view(table):
        return None
    if table.meta.get("phase") is not node.meta.get("phase"):
        return None
    return table if all(user is node or _is_row_of(user, node) for user in table.users) else None


def _is_row_of(user: fx.Node, put: fx.Node) -> bool:
    """Whether the user picks rows of the table to which something is added before they are put back."""
    if user.target is not aten.index.Tensor or len(user.users) != 1:
        return False
    (added,) = user.users
    return put.args[2] is added and list(added.users) == [put]
