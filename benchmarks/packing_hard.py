"""How many of two hundred hard lists of buffers are packed at their full capacity, and what each switch is worth.

python benchmarks/packing_hard.py --instances 200 --seconds 60 --json benchmarks/results/hardpacking_cpu.json
python benchmarks/packing_hard.py --instances 50 --seconds 20 --without beam
python benchmarks/packing_hard.py --instances 50 --seconds 20 --without even --without beneath

Seconds are of one core's time, so that other work on the machine does not count. The exit status is 1 where a list is
not packed. With --json the run is added to those in the file.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import math
import os
import platform
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from packing_hard_instances import Instance, instances

import memopt
from memopt.solve.pack import Switches, pack
from tests.solve.check_pack import check_packing

SWITCHES = [field.name for field in dataclasses.fields(Switches)]


class _OverError(Exception):
    """The list had its time."""


def _over(*_: object) -> None:
    raise _OverError


def measure(instance: Instance, seconds: float, switches: Switches) -> dict[str, Any]:
    """Pack one list into its capacity and have the packing judged."""
    started, packed = time.process_time(), False
    signal.signal(signal.SIGPROF, _over)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        packing = pack(instance.buffers, instance.capacity, math.inf, switches)
        signal.setitimer(signal.ITIMER_PROF, 0)
        check_packing(instance.buffers, packing.offsets, packing.size, instance.capacity)
        packed = True
    except _OverError:
        pass
    return {
        "instance": instance.name,
        "buffers": len(instance.buffers),
        "packed": packed,
        "seconds": round(time.process_time() - started, 2),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts by kind, and how long the packed ones took."""
    kinds: dict[str, list[bool]] = collections.defaultdict(list)
    for row in rows:
        kinds[row["instance"].split()[0]].append(row["packed"])
    took = [row["seconds"] for row in rows if row["packed"]] or [0.0]
    return {
        "packed": sum(row["packed"] for row in rows),
        "of": len(rows),
        "by_kind": {kind: f"{sum(packed)} of {len(packed)}" for kind, packed in kinds.items()},
        "median_seconds": statistics.median(took),
        "longest_seconds": max(took),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the number of the first list")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each list")
    parser.add_argument("--without", action="append", choices=SWITCHES, default=[], help="a part of the search")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    switches = Switches(**dict.fromkeys(given.without, False))
    rows = []
    for number, instance in enumerate(instances(given.first + given.instances)):
        if number < given.first:
            continue
        row = measure(instance, given.seconds, switches)
        rows.append(row)
        state = "packed" if row["packed"] else "not packed"
        print(f"{row['instance']:16} {row['buffers']:4} buffers  {row['seconds']:6.2f} s  {state}", flush=True)
    run = {
        "without": given.without,
        "settings": {"instances": given.instances, "first": given.first, "seconds": given.seconds},
        **summary(rows),
        "lists": rows,
    }
    print(json.dumps({key: value for key, value in run.items() if key != "lists"}, indent=1))
    if given.json:
        result = {"machine": platform.machine(), "threads": 1, "python": platform.python_version(), "rows": []}
        if given.json.exists():
            result = json.loads(given.json.read_text())
        others = [r for r in result["rows"] if (r["without"], r["settings"]) != (run["without"], run["settings"])]
        result |= {"memopt": memopt.__version__, "rows": [*others, run]}
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(row["packed"] for row in rows) else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
