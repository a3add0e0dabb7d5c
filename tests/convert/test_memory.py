"""Weights above two gigabytes: streamed to a file of their own, within one and a half times their size."""

import os
import subprocess
import sys

import pytest

from memopt.convert.onnx_file import external_files, size_of

FACTORY = """
import torch
class Deep(torch.nn.Sequential):
    def __init__(self, layers=22):
        super().__init__(*(torch.nn.Linear(5000, 5000, bias=False) for _ in range(layers)))
class Shallow(Deep):
    def __init__(self):
        super().__init__(1)
"""


def peak_bytes(folder, name):
    """The most memory that the process held, file pages included."""
    paths = os.pathsep.join(path for path in (os.getcwd(), *sys.path) if path)
    words = ["convert", f"factory:{name}", "-o", f"{name}.onnx", "--input", "input=2x5000"]
    code = "import sys; from memopt.cli import main; main(sys.argv[1:])"
    child = subprocess.Popen([sys.executable, "-c", code, *words], cwd=folder, env={**os.environ, "PYTHONPATH": paths})
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    return usage.ru_maxrss * 1024


@pytest.mark.slow
def test_peak_of_a_large_conversion(tmp_path):
    (tmp_path / "factory.py").write_text(FACTORY)
    weights = 22 * 5000 * 5000 * 4
    base, peak = peak_bytes(tmp_path, "Shallow"), peak_bytes(tmp_path, "Deep")
    assert external_files(tmp_path / "Deep.onnx") == {"Deep.onnx.data"}
    assert weights <= size_of(tmp_path / "Deep.onnx") <= 1.01 * weights
    assert peak < 1.5 * weights, f"{peak / weights:.2f} times the weights; {base / 1e6:.0f} MB for a small model"
    assert sorted(name for name in os.listdir(tmp_path) if not name.startswith("__")) == [
        "Deep.onnx",
        "Deep.onnx.data",
        "Shallow.onnx",
        "factory.py",
    ]
