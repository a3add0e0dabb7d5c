"""Whole loops of users: rows with a budget wait for their reference, and a row that was over says so."""

from __future__ import annotations

import argparse
import json

import pytest

from benchmarks import user_loop
from benchmarks.render_loops import loop_table
from benchmarks.user_loop import Loop

pytest.importorskip("transformers")


def loop(rows, pairs=0):
    given = argparse.Namespace(tiny=True, rows=rows, device="cpu", repeats=1, losses=2, jobs=1, json=None, pairs=pairs)
    return Loop(given, "gpt2_medium", None)


def test_a_budget_is_a_share_of_what_compile_reserved():
    table = loop("compile,memopt:0.5,memopt,eager")
    assert [*table.jobs()] == ["compile", "memopt", "eager"]
    table.take("compile", {"kind": "row", "reserved_bytes": 1000, "seconds": [3.0, 1.0, 2.0], "first_step_seconds": 9})
    assert (
        table.jobs()["memopt:0.5"].more["budget_bytes"] == 500 and table.jobs()["memopt"].more["budget_bytes"] is None
    )
    assert table.rows["compile"]["seconds"] == 2.0


def test_what_is_over_its_budget_is_said_and_losses_are_beside_eager_s():
    table = loop("eager,memopt:0.5")
    table.reference = 1000
    timed = {"kind": "row", "seconds": [1.0], "first_step_seconds": 1.0}
    table.take("eager", {**timed, "losses": [2.0, 1.0]})
    table.take("memopt:0.5", {**timed, "losses": [2.0, 1.25], "reserved_bytes": 501})
    assert table.apart("memopt:0.5") == 0.25
    assert table.line("memopt:0.5").endswith("OVER") and not table.line("eager").endswith("OVER")
    table.take("memopt:0.5", {**timed, "reserved_bytes": 500})
    assert "OVER" not in table.line("memopt:0.5")


def test_a_loop_runs_in_a_process_of_its_own(monkeypatch, tmp_path, capsys):
    file = tmp_path / "loop.json"
    options = [
        "--model",
        "llama_1b",
        "--tiny",
        "--rows",
        "eager",
        "--losses",
        "2",
        "--repeats",
        "1",
        "--json",
        str(file),
    ]
    monkeypatch.setattr("sys.argv", ["user_loop.py", *options])
    assert user_loop.main() == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert row["row"] == "eager" and len(row["losses"]) == 2 and row["seconds"] > 0
    assert "llama_1b       eager" in capsys.readouterr().out


def test_batches_of_many_sizes_are_shares_of_eager_and_say_where_code_was_waited_for():
    table = loop("eager,compile_dynamic,memopt:0.5", pairs=3)
    assert [*table.jobs()] == ["eager", "compile_dynamic"]
    table.take("eager", {"kind": "row", "reserved_bytes": 1000, "seconds": [0.1, 0.2, 0.6], "first_step_seconds": 1.0})
    assert table.jobs()["memopt:0.5"].more["budget_bytes"] == 500 and table.rows["eager"]["seconds"] == pytest.approx(
        0.3
    )
    waited = {"loss_seconds": [9.0, 2.0, 3.5], "first_step_seconds": 9.0, "seconds": [0.3, 0.3, 0.3]}
    table.take("memopt:0.5", {"kind": "row", "reserved_bytes": 400, **waited})
    assert "waited for code in 2 steps" in table.line("memopt:0.5")
    table.take("compile_dynamic", {"kind": "row", **waited, "seconds": [0.2, 0.2, 0.2], "graphs": 3})
    table.sizes = {"batch": 4, "length": 32}
    shown = loop_table(table.described() | {"model": "gpt2_medium"}).splitlines()
    assert "3 sizes of batch and length, the largest batch 4, length 32" in shown[0]
    assert {line.count("|") for line in shown[2:]} == {14}
    assert [cell.strip() for cell in shown[-1].split("|")[-4:-1]] == ["3", "2", "14 s"] and "| 1.500 |" in shown[-2]


def test_varied_batches_have_sizes_of_their_own_and_one_is_the_largest():
    from benchmarks.user_models import batches

    made = batches("gpt2_medium", 12, {"batch": 4, "length": 32}, tiny=True, device="cpu", varied=True)
    sizes = [tuple(batch["input_ids"].shape) for batch in made]
    assert (4, 32) in sizes and len(set(sizes)) > 8
    assert all(1 <= rows <= 4 and 4 <= length <= 32 for rows, length in sizes)
