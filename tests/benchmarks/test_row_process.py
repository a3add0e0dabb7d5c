from __future__ import annotations

import os
import sys
import time

from benchmarks.row_process import RowProcess

# Starts a process of its own, says both numbers, and waits to be told to go on.
WORKER = """
import json, os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(f"READY {os.getpid()} {child.pid}", flush=True)
sys.stdin.readline()
print("ROW", json.dumps({"model": "m", "row": "r", "seconds": 1.0}), flush=True)
sys.stdin.readline()
child.kill()
"""


def state(process: int) -> str:
    """R, S, T (stopped), Z (ended)."""
    with open(f"/proc/{process}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0]


def settled(process: int, wanted: str) -> bool:
    end = time.monotonic() + 100
    while time.monotonic() < end:
        if (state(process) if os.path.exists(f"/proc/{process}") else "Z") in wanted:
            return True
        time.sleep(0.02)
    return False


def test_a_row_stops_goes_on_and_ends_with_what_it_started() -> None:
    row = RowProcess("m", "r", [sys.executable, "-c", WORKER], {})
    first, second = map(int, (row.wait_for("READY", 300) or "").split())
    row.stop()
    assert settled(first, "T") and settled(second, "T")
    row.resume()
    assert settled(first, "RS") and settled(second, "RS")
    assert row.finish(False)["seconds"] == 1.0
    again = RowProcess("m", "r", [sys.executable, "-c", WORKER], {})
    first, second = map(int, (again.wait_for("READY", 300) or "").split())
    again.kill()
    assert settled(first, "Z") and settled(second, "Z")
    assert "error_text" in again.finish(False)
