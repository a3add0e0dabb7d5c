"""What is written over: sums of products, and tables that rows are added to."""

import torch
from torch import fx

from memopt.patterns.overwrites import written_over
from memopt.patterns.product_sums import ADD_PRODUCT
from memopt.program import Phase

aten = torch.ops.aten


def graph():
    """Rows put into a product, after something is added to those that are there."""
    made = fx.Graph()
    left, ids, rows = (made.placeholder(name) for name in ("left", "ids", "rows"))
    table = made.call_function(aten.mm.default, (left, left))
    there = made.call_function(aten.index.Tensor, (table, [ids]))
    added = made.call_function(aten.add.Tensor, (there, rows))
    put = made.call_function(aten.index_put.default, (table, [ids], added))
    for node in (table, there, added, put):
        node.meta = {"val": torch.zeros(4, 4), "phase": Phase.BACKWARD}
    return table, there, added, put


def test_a_table_is_written_over_where_only_its_rows_are_read():
    table, there, added, put = graph()
    assert written_over(put) is table
    assert all(written_over(node) is None for node in (table, there, added))
    table.graph.call_function(aten.sum.default, (table,))
    assert written_over(put) is None


def test_rows_that_others_read_may_be_read_later():
    for reader in (1, 2):
        *nodes, put = graph()
        put.graph.call_function(aten.neg.default, (nodes[reader],))
        assert written_over(put) is None


def test_what_waits_since_forward_and_what_is_given_is_kept():
    table, _, _, put = graph()
    table.meta["phase"] = Phase.FORWARD
    assert written_over(put) is None
    table, _, _, put = graph()
    put.replace_input_with(table, table.args[0])
    assert written_over(put) is None


def test_a_sum_of_products_is():
    table, *_ = graph()
    added = table.graph.call_function(ADD_PRODUCT, (table, *table.args))
    added.meta = dict(table.meta)
    assert written_over(added) is None, "others read it"
    for user in list(table.users):
        user.replace_input_with(table, table.args[0])
    added.args = (table, *table.args)
    assert written_over(added) is table
