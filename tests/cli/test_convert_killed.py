"""A conversion that is killed, at ten moments, leaves no output and no part of one; an output that was there stays."""

import os
import signal
import subprocess
import sys

import pytest

from memopt.convert.onnx_file import external_files

# Functions on the way, in order; the process ends as one is entered, or as it has returned.
MOMENTS = [
    ("memopt.convert.pipeline.capture", "before"),
    ("memopt.convert.pipeline.emit", "before"),
    ("memopt.convert.pipeline.emit", "after"),
    ("memopt.convert.pipeline.rewritten", "after"),
    ("memopt.convert.pipeline.verify", "before"),
    ("memopt.convert.pipeline.verify", "after"),
    ("memopt.convert.write.write_whole", "before"),
    ("os.fdopen", "after"),
    ("os.fsync", "before"),
    ("os.fsync", "after"),
]

# With the weights in a file beside: a folder may stay, which the next run removes.
BESIDE = [
    ("onnx_ir.save", "before"),
    ("onnx_ir.save", "after"),
    ("memopt.convert.pipeline.verify", "before"),
    ("memopt.convert.pipeline.verify", "after"),
    ("memopt.convert.write._move", "before"),
    ("os.replace", "before"),
    ("os.replace", "after"),
    ("memopt.convert.write._move", "after"),
]

DRIVER = """
import importlib, os, signal, sys
place, when, *words = sys.argv[1:]
import functools, memopt.convert.pipeline, memopt.convert.write
from memopt.cli import main
if words[-1] == "beside":
    words.pop()
    memopt.convert.pipeline.staged = functools.partial(memopt.convert.write.staged, external_above=0)
    beside = memopt.convert.pipeline.staged
    memopt.convert.pipeline.staged = lambda model, output, **how: beside(model, output)
if place == "nowhere":
    sys.exit(main(words))
module, _, name = place.rpartition(".")
module = importlib.import_module(module)
real = getattr(module, name)

def deadly(*args, **kwargs):
    if place == "os.fdopen" and args[1:] != ("wb",):
        return real(*args, **kwargs)
    if when == "after":
        real(*args, **kwargs)
    os.kill(os.getpid(), signal.SIGKILL)

setattr(module, name, deadly)
main(words)
"""


def ended(folder, place, when, *words):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in (os.getcwd(), *sys.path) if path)}
    command = [sys.executable, "-W", "ignore", "-c", DRIVER, place, when]
    command += ["convert", "gpt2:tiny", "-o", "m.onnx", "--no-measure", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=600, check=False)


def killed(folder, place, when, *words):
    done = ended(folder, place, when, *words)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()


@pytest.mark.slow
@pytest.mark.parametrize(("place", "when"), MOMENTS)
def test_nothing_is_left(tmp_path, place, when):
    killed(tmp_path, place, when)
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_what_was_there_stays(tmp_path):
    (tmp_path / "m.onnx").write_text("mine")
    killed(tmp_path, "os.fsync", "after", "--overwrite")
    assert os.listdir(tmp_path) == ["m.onnx"]
    assert (tmp_path / "m.onnx").read_text() == "mine"
    killed(tmp_path, "os.replace", "after", "--overwrite")
    assert os.listdir(tmp_path) == ["m.onnx"]
    assert (tmp_path / "m.onnx").stat().st_size > 10_000


@pytest.mark.slow
def test_with_weights_beside_no_model_without_them_stays_and_the_next_run_cleans_up(tmp_path):
    for place, when in BESIDE:
        killed(tmp_path, place, when, "--overwrite", "beside")
        found = os.listdir(tmp_path)
        # Never more than one folder, however often it is killed; the model is there only with its weights.
        assert sum(name.startswith(".m.onnx.") for name in found) == 1, (place, when, found)
        assert ("m.onnx" in found) == (place.endswith("_move") and when == "after"), (place, when, found)
    done = ended(tmp_path, "nowhere", "never", "--overwrite", "beside")
    assert done.returncode == 0, done.stderr.decode()
    (data,) = external_files(tmp_path / "m.onnx")
    assert sorted(os.listdir(tmp_path)) == sorted(["m.onnx", data])
