"""A conversion that is killed, at ten moments, leaves no output and no part of one; an output that was there stays."""

import os
import signal
import subprocess
import sys

import pytest

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

DRIVER = """
import importlib, os, signal, sys
place, when, *words = sys.argv[1:]
import memopt.convert.pipeline, memopt.convert.write
from memopt.cli import main
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


def killed(folder, place, when, *words):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in (os.getcwd(), *sys.path) if path)}
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        DRIVER,
        place,
        when,
        "convert",
        "gpt2:tiny",
        "-o",
        "m.onnx",
        *words,
    ]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=120, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()


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
