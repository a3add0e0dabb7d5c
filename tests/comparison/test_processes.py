"""Worker processes: what they say is heard, and one that dies, hangs or has started others is ended with a reason."""

import os
import subprocess
import sys
import time

import pytest

from memopt.comparison.job import Job, Source
from memopt.comparison.processes import Worker, WorkerFailed, device_used, driver_version

JOB = Job(Source("m:f"), "aten", False, "cpu")


def tool(folder, name, text):
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start a process that runs this text in place of a worker."""
    running = []

    def begin(text, seconds=30.0, **environment):
        (tmp_path / "text.py").write_text(text)
        script = tool(tmp_path, "python", f'#!/bin/sh\nexec "{real}" -u "{tmp_path}/text.py" "$@"\n')
        monkeypatch.setattr(sys, "executable", str(script))
        running.append(Worker(JOB, tmp_path, "row", seconds, environment))
        return running[-1]

    real = sys.executable
    yield begin
    for worker in running:
        worker.end()


def test_what_is_said_is_heard_in_order_and_it_goes_on_when_told(start):
    worker = start("""
import json, os, sys
assert json.load(open(sys.argv[-1]))["engine"] == "aten"
print(json.dumps({"kind": "ready", "place": os.environ["PLACE"]}))
said = sys.stdin.readline()
print(json.dumps({"kind": "row", "said": said}))
""", PLACE="here")  # fmt: skip
    assert worker.expect() == {"kind": "ready", "place": "here"}
    assert worker.heard() is None
    worker.go(20.0)
    assert worker.expect() == {"kind": "row", "said": "go\n"}
    with pytest.raises(WorkerFailed, match=r"^exit code 0$"):
        worker.expect()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import sys; sys.exit(3)", "exit code 3"),
        (
            "print('trace', file=__import__('sys').stderr); raise ValueError('no disk')",
            "exit code 1: ValueError: no disk",
        ),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL"),
        ("import os; os.write(2, b'half \\xff a word\\n\\n'); os._exit(4)", "exit code 4: half \ufffd a word"),
        ("import os; os.write(2, b'some error: x\\nbye\\n'); os._exit(4)", "exit code 4: some error: x"),
        ("import os; os.write(2, b'e' * 1000); os._exit(4)", f"exit code 4: {'e' * 300}"),
    ],
)
def test_one_that_dies_says_how(start, text, reason):
    with pytest.raises(WorkerFailed) as caught:
        start(text).expect()
    assert str(caught.value) == reason


def test_one_that_says_nothing_is_ended(start):
    worker = start("import time; time.sleep(600)", seconds=0.3)
    began = time.monotonic()
    with pytest.raises(WorkerFailed, match=r"^no result within 0\.3 s$"):
        worker.expect()
    assert time.monotonic() - began < 300
    hasty = start("import time; time.sleep(60)", seconds=0.0)
    with pytest.raises(WorkerFailed, match=r"^no result within 0 s$"):
        while hasty.heard() is None:
            time.sleep(0.01)


def test_what_it_has_started_ends_with_it(start):
    worker = start("""
import json, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
print(json.dumps({"kind": "ready", "child": child.pid}))
time.sleep(600)
""")  # fmt: skip
    child = worker.expect()["child"]
    worker.end()
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and alive(child):
        time.sleep(0.02)
    assert not alive(child)
    worker.end()  # once more does nothing


def alive(process):
    """Whether it runs: one that has ended may wait to be fetched by whoever inherits it."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.long
def test_the_time_in_which_one_is_stopped_is_not_its_own(start):
    worker = start("""
import json, time
print(json.dumps({"kind": "ready"}))
time.sleep(3.0)
print(json.dumps({"kind": "row"}))
""", seconds=100.0)  # fmt: skip
    worker.expect()
    worker.go(5.0)
    worker.stop()
    time.sleep(4.0)
    assert worker._lines.empty(), "it is stopped"
    worker.go_on()
    assert worker.expect() == {"kind": "row"}


def test_without_a_device_nothing_of_it_is_used():
    assert device_used("") is None
    began = time.monotonic()
    assert device_used("", after=600.0) is None and time.monotonic() - began < 300


@pytest.mark.gpu
def test_bytes_of_a_device():
    assert device_used("cuda") > 0


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("#!/bin/sh\necho 570.86.15\n", "570.86.15"),
        ("#!/bin/sh\necho 570.1; echo 570.1\n", "570.1"),
        ("#!/bin/sh\n", None),
        ("#!/bin/sh\necho 1; exit 9\n", None),
        (None, None),
    ],
)
def test_the_drivers_version_where_its_tool_says_it(tmp_path, monkeypatch, text, version):
    if text is not None:
        tool(tmp_path, "nvidia-smi", text)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert driver_version() == version


def test_a_tool_that_hangs_says_nothing(monkeypatch):
    def hangs(*args, timeout, **options):
        raise subprocess.TimeoutExpired(args[0], timeout)

    monkeypatch.setattr(subprocess, "run", hangs)
    assert driver_version() is None and os.environ["PATH"]
