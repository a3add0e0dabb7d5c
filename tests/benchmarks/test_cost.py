"""The benchmark of costs runs, and what it says is of one kind."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_benchmark_of_costs(tmp_path):
    script = [sys.executable, str(ROOT / "benchmarks" / "cost.py"), "--tiny", "--models", "unet", "--repeats", "1"]
    found = subprocess.run(
        [*script, "--target", "h100", "--json", str(tmp_path / "out.json")], capture_output=True, text=True, cwd=ROOT
    )
    assert found.returncode == 0, found.stderr
    assert "unet" in found.stdout and "roofline" in found.stdout
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert all(row[f"{kind}_seconds"] > 0 for kind in ("roofline", "predicted", "measured"))
    assert 0 < row["measured_share"] <= 1
