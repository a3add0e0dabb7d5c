"""The table of loops of training libraries on a GPU."""

from benchmarks.render_loops import library_table


def test_a_row_over_its_budget_and_one_that_failed_say_so():
    alone = {"reserved": 10_000_000, "step": 0.1, "first": 5.0, "losses": [2.0, 1.0]}
    within = alone | {"reserved": 6_000_000, "step": 0.11, "losses": [2.0, 1.01], "budget": 6_000_000}
    over = within | {"reserved": 6_000_001}
    rows = {"a": alone, "b": alone, "c": alone, "a:0.6": within, "b:0.6": over, "c:0.6": {"failed": "why"}}
    told = {"machine": "a card", "versions": {"torch": "2.11", "lightning": "2.6"}}
    lines = library_table({**told, "rows": [{"row": name, **row} for name, row in rows.items()]}).splitlines()
    assert lines[:2] == ["a card; torch 2.11, lightning 2.6:", ""]
    assert lines[7:] == [
        "| a:0.6 | 6 MB | 6 MB | 110 ms (1.10) | 5 s | 1.0e-02 |",
        "| b:0.6 | 6 MB **over** | 6 MB | 110 ms (1.10) | 5 s | 1.0e-02 |",
        "| c:0.6 | | why | | | |",
    ]
