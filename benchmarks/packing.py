"""How small an arena is found for lists of buffers, and how soon, on one core.

python benchmarks/packing.py --folder FOLDER --json benchmarks/results/packing_cpu.json
python benchmarks/packing.py --counts 60

FOLDER holds lists in minimalloc's format; NAME.CAPACITY.csv is packed into CAPACITY bytes, NAME.csv as small as can be.
Beside them rectangles are cut apart at random, so that a capacity is known, and packed as small as can be.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packing_instances import cut_rectangle

import memopt
from memopt.solve.pack import Buffer, pack
from memopt.solve.pack_csv import read_table
from memopt.solve.pack_greedy import best_of_orders, by_size
from memopt.solve.pack_problem import pieces
from tests.solve.check_pack import check_packing

CAPACITY = 1 << 20


def listed(folder: Path) -> Iterator[tuple[str, list[Buffer], int, int | None]]:
    """Name, buffers, known capacity, and the capacity to pack into, of each list in the folder."""
    for path in sorted(folder.glob("*.csv")):
        name, _, digits = path.stem.rpartition(".")
        capacity = int(digits) if digits.isdigit() else None
        buffers = list(read_table(path.read_text()).buffers)
        known = max(piece.lower_bound for piece in pieces(buffers)) if capacity is None else capacity
        yield name if capacity is not None else path.stem, buffers, known, capacity


def made(counts: list[int]) -> Iterator[tuple[str, list[Buffer], int, int | None]]:
    """Cut rectangles: few and many buffers, long and short lives, whole and with a share of the lives shortened."""
    for count in counts:
        for across in (0.3, 0.5, 0.7):
            for shorten in (0.0, 0.3):
                buffers = cut_rectangle(count, 2 * count, CAPACITY, 1024, 1, across=across, shorten=shorten)
                yield f"cut, {across:.0%} across, {shorten:.0%} shortened", buffers, CAPACITY, None


def measure(name: str, buffers: list[Buffer], known: int, capacity: int | None, timeout: float) -> dict[str, Any]:
    """Pack one list and have the packing judged."""
    parts = pieces(buffers)
    greedy = max(by_size(part) for part in parts)
    heuristic = max(best_of_orders(part, known, time.monotonic() + timeout).size for part in parts)
    started = time.perf_counter()
    packing = pack(buffers, capacity, timeout)
    seconds = time.perf_counter() - started
    check_packing(buffers, packing.offsets, packing.size)
    return {
        "instance": name,
        "buffers": len(buffers),
        "capacity": known,
        "lower_bound_bytes": packing.lower_bound,
        "greedy_bytes": greedy,
        "heuristic_bytes": heuristic,
        "memopt_bytes": packing.size,
        "seconds": seconds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="lists in minimalloc's format")
    parser.add_argument("--counts", type=int, nargs="*", default=[60, 120, 240, 450], help="buffers of cut rectangles")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for each list")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = []
    for instance in [*(listed(given.folder) if given.folder else ()), *made(given.counts)]:
        row = measure(*instance, given.timeout)
        rows.append(row)
        kinds = ("lower_bound_bytes", "greedy_bytes", "heuristic_bytes", "memopt_bytes")
        shares = "  ".join(f"{kind.removesuffix('_bytes')} {row[kind] / row['capacity']:.3f}" for kind in kinds)
        print(f"{row['instance']:36} {row['buffers']:5} buffers  {shares}  {row['seconds']:6.2f} s", flush=True)
    result = {
        "machine": platform.processor() or platform.machine(),
        "threads": 1,
        "python": platform.python_version(),
        "memopt": memopt.__version__,
        "settings": {"timeout": given.timeout},
        "rows": rows,
    }
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
