"""The benchmark of arenas runs, and its rows are consistent."""

import torch

from benchmarks import arena


def test_the_cells_row():
    (given,) = arena.models(True, ["searched_cells"])
    with torch.no_grad():
        row = arena.row_of(given[0], given[1].eval(), given[2], 1, None)
    assert row["allocated_beside_results"] == 0 and row["relative_error"] < 1e-5
    assert row["joined_bytes"] <= row["reordered_bytes"] < row["given_order_bytes"] < row["sum_bytes"]
    assert row["arena_lower_bound"] <= row["arena_bytes"] <= row["greedy_by_size_bytes"]
    assert row["order_proved_best"]
