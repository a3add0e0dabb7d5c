"""The benchmark of budgets: shares of a model's own peak, until one is refused, and the least that this names."""

from __future__ import annotations

import json

import pytest

from benchmarks import budgets
from benchmarks.render_budgets import budgets_table


@pytest.mark.slow  # half a minute of processes
def test_a_model_is_walked_down_to_its_least(tmp_path, monkeypatch, capsys):
    out = tmp_path / "budgets_cpu.json"
    given = ["--models", "llama_tiny,nothing", "--backends", "aten", "--shares", "0.8,0.2", "--json", str(out)]
    monkeypatch.setattr("sys.argv", ["budgets.py", *given])
    assert budgets.main() == 0
    result = json.loads(out.read_text())
    plain, kept, refused, least, failed = result["rows"]
    assert "no model 'nothing'" in failed["error"] and failed["error"] in capsys.readouterr().out
    assert plain["row"] == "eager" and kept["row"] == "80%"
    assert kept["budget_bytes"] == int(0.8 * plain["peak_bytes"])
    for row in (kept, least):
        assert row["peak_bytes"] == row["predicted_bytes"] <= row["budget_bytes"]
        assert row["gradient_error"] < 1e-5
    assert refused["budget_bytes"] < refused["minimum_bytes"]
    assert least["budget_bytes"] == int(refused["minimum_bytes"] * 1.02)
    table = budgets_table(result)
    assert "2 of 2 steps stayed within their budget" in table and failed["error"] in table
    assert f"{least['budget_bytes'] / 1e3:,.0f} kB: " in table


def test_what_is_over_a_budget_or_refused_twice_is_told():
    common = {"model": "one", "backend": "inductor", "gradient_error": 1e-7, "notes": []}
    rows = [
        {**common, "row": "compile", "peak_bytes": 1000, "seconds": 0.1},
        {**common, "row": "90%", "peak_bytes": 990, "seconds": 0.2, "budget_bytes": 900, "predicted_bytes": 880},
        {"model": "one", "backend": "inductor", "row": "80%", "budget_bytes": 800, "minimum_bytes": 870},
        {"model": "one", "backend": "inductor", "row": "least", "budget_bytes": 887, "minimum_bytes": 900},
    ]
    rows[1]["notes"] = ["this graph runs operator by operator"]
    settings = {"batch": 4, "repeats": 20}
    table = budgets_table({"machine": "one", "threads": 2, "torch": "2", "settings": settings, "rows": rows})
    assert "0 of 1 steps stayed within their budget; the predicted peak is off by -11.11% to -11.11%, in 1 of" in table
    assert "| one | 1 kB | 110.0%, 2.00¹ |  | 1 kB, refused again |" in table
