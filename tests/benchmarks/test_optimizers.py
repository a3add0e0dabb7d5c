"""The benchmark of optimizers: one row end to end on CPU, and rows that failed."""

from __future__ import annotations

import argparse
import json

import pytest

from benchmarks import optimizers, render


@pytest.mark.long
def test_a_row_predicts_what_three_steps_take(tmp_path, monkeypatch):
    monkeypatch.setattr(optimizers, "ENGINES", {"aten": ("SGD, momentum",)})
    out = tmp_path / "optimizers_cpu.json"
    monkeypatch.setattr("sys.argv", ["optimizers.py", "--tiny", "--models", "resnet50", "--json", str(out)])
    assert optimizers.main() == 0
    result = json.loads(out.read_text())
    (row,) = result["rows"]
    assert row["state_bytes"] == row["state_predicted_bytes"] > 0
    assert abs(row["predicted_bytes"] / row["peak_bytes"] - 1) < 0.03
    assert row["peak_bytes"] <= row["budget_bytes"]
    assert row["reserved_bytes"] is None and result["settings"]["tiny"]


def test_a_row_that_fails_says_why():
    given = argparse.Namespace(passed=["--tiny", "--device", "nowhere"])
    row = optimizers.row_of(given, "resnet50:Adafactor:aten")
    assert "nowhere" in row["error"] and row["error"] in optimizers.line_of(row)
    header = {"machine": "GPU", "driver": "1", "torch": "2", "settings": {"steps": 3}}
    assert row["error"] in render.optimizers_table({**header, "rows": [row]})
