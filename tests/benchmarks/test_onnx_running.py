"""What is said of a run of an ONNX file: the least figures, the largest error, and why there is none."""

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from benchmarks.onnx_running import better, difference, run  # noqa: E402
from tests.onnx.build import model  # noqa: E402


def test_the_least_figure_counts_and_the_largest_error():
    first, second = ({"seconds": s, "peak_bytes": p, "error": e} for s, p, e in ((2.0, 5, 1e-7), (1.0, 9, 1e-6)))
    assert better(first, second) == {"seconds": 1.0, "peak_bytes": 5, "error": 1e-6}
    assert better({"nodes": 3}, first) == {"nodes": 3, **first}
    assert better(first, {"failed": "no"})["failed"] == "no"


def test_differences_are_shares_of_the_largest_value():
    assert difference(np.array([1.0, 4.5]), np.array([1.0, 4.0])) == 0.125
    assert difference(np.ones(2), np.ones(3)) == float("inf")


def test_a_file_is_run_and_compared(tmp_path):
    onnx.save(model("(float[2] x) => (float[2] y) { y = Neg(x) }"), tmp_path / "model.onnx")
    np.savez(tmp_path / "inputs.npz", x=np.array([1.0, 4.0], np.float32))
    np.savez(tmp_path / "outputs.npz", y=np.array([-1.0, -3.0], np.float32))
    (row,) = run([tmp_path / "model.onnx"], tmp_path, "cpu", repeats=3, rounds=1)
    assert row["error"] == pytest.approx(1 / 3) and row["seconds"] > 0
    assert "peak_bytes" in row  # of a process that has given memory back it may be anything
