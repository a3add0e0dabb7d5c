"""The comparison of ONNX files runs, and counts what it says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from benchmarks.onnx_files import counted  # noqa: E402
from tests.onnx.build import model, weight  # noqa: E402

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "onnx_files.py"


def test_nodes_of_all_graphs_and_bytes_of_all_files(tmp_path):
    text = "(bool c, float[2] x) => (float[2] y) { y = If (c) <then_branch = g () => (float[2] a) { a = Neg(x) }, "
    text += "else_branch = h () => (float[2] b) { d = Abs(x) b = Add(d, w) }> }"
    onnx.save(model(text, {"w": weight(2)}), tmp_path / "model.onnx")
    (tmp_path / "model.onnx.data").write_bytes(bytes(1000))
    (tmp_path / "config.json").write_text("{}")
    size = (tmp_path / "model.onnx").stat().st_size + 1000
    assert counted(tmp_path / "model.onnx") == {"nodes": 4, "file_bytes": size}


@pytest.mark.slow
def test_it_runs(tmp_path):
    out = tmp_path / "r.json"
    command = [sys.executable, str(SCRIPT), "--tiny", "--only", "resnet50", "--rounds", "1", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = {row["engine"]: row for row in json.loads(out.read_text())["rows"]}
    assert all(rows[engine]["error"] < 1e-5 for engine in ("torch", "onnxruntime", "memopt", "memopt/onnxruntime"))
    assert rows["onnxsim"]["failed"] == "no --peers" and "resnet50" in done.stdout
