"""The process that runs a file to be measured: what it prints, and that it loads neither torch nor memopt."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from memopt.convert import measure_child
from tests.onnx.build import model

SCRIPT = Path(measure_child.__file__)


@pytest.fixture
def place(tmp_path):
    onnx.save(model("(float[64] x) => (float[64] y) { y = Neg(x) }"), tmp_path / "small.onnx")
    large = "(float[64] x) => (float[64] y) { b = Expand(x, sizes) c = Neg(b) d = ReduceSum(c, axis) y = Add(d, x) }"
    numbers = {"sizes": np.array([1 << 17, 64], np.int64), "axis": np.array([0, 1], np.int64)}
    onnx.save(model(large, numbers), tmp_path / "large.onnx")
    np.savez(tmp_path / "feeds.npz", x=np.ones(64, np.float32))
    return tmp_path


def child(*words):
    return subprocess.run([sys.executable, str(SCRIPT), *map(str, words)], capture_output=True, text=True, timeout=600)


def test_the_peak_grows_with_what_a_run_holds(place):
    small, large = (
        json.loads(child("peak", 1, place / "feeds.npz", place / name).stdout) for name in ("small.onnx", "large.onnx")
    )
    assert len(small) == len(large) == 1 and large[0] - small[0] > (1 << 17) * 64 * 4


def test_a_time_for_each_file(place):
    done = child("latency", 1, place / "feeds.npz", place / "small.onnx", place / "large.onnx")
    small, large = json.loads(done.stdout)
    assert 0 < small < large


@pytest.mark.parametrize("words", [("peak", 1, "feeds.npz", "absent.onnx"), ("latency", 1, "absent.npz", "small.onnx")])
def test_a_file_that_is_not_there_is_an_exit_code(place, words):
    what, count, *names = words
    done = child(what, count, *(place / name for name in names))
    assert done.returncode and not done.stdout and "absent" in done.stderr


def test_what_is_measured_is_onnx_runtimes_alone():
    code = (
        f"import runpy, sys; runpy.run_path({str(SCRIPT)!r}); print(sorted({{'torch', 'memopt'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_kernels_words_on_this_process():
    assert 0 < measure_child.status("VmRSS") <= measure_child.status("VmHWM")
    with pytest.raises(StopIteration):
        measure_child.status("VmNothing")
