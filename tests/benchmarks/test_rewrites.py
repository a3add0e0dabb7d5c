"""The benchmark of what rewrites cost runs, for a model that some rewrites change."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_benchmark_of_rewrites():
    script = [sys.executable, str(ROOT / "benchmarks" / "rewrites.py"), "--tiny", "--model", "gpt2"]
    found = subprocess.run(script, capture_output=True, text=True, cwd=ROOT)
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    sets = [line.split(":")[0] for line in lines if "by data sheet" in line and not line.startswith(" ")]
    assert sets[0] == "none" and "chunk_loss" in sets and len(sets) == len(set(sets))
    operators = [line for line in lines if line.startswith(" ") and "by data sheet: aten." in line]
    assert len(operators) >= len(sets)
