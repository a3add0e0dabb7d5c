"""Loops of other libraries alone and within a share of their own peak, each run in a process of its own.

python -m benchmarks.integrations [NAME …] [--engine aten] [--shares 0.8 0.6] [--markdown FILE]

A run trains two epochs with accumulation, evaluation, checkpoints and a smaller last batch, in float32 and under
autocast to bfloat16, then resumes from the first checkpoint for two epochs more. A row is the largest peak over the
budget, and the largest difference of a loss from the library's alone; ends with 1 where one is over, or losses differ.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.integrations.loops import LOOPS
from benchmarks.integrations.run import ROW_HEAD, Row, row_of

SHARE = 0.7


def main() -> int:
    """Run them, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--engine", default="aten")
    parser.add_argument("--shares", type=float, nargs="+", default=[SHARE])
    parser.add_argument("--markdown")
    given = parser.parse_args()
    rows: list[Row] = []
    for name in given.names or LOOPS:
        for bf16 in (False, True):
            for row in row_of(name, bf16, given.shares, given.engine):
                rows.append(row)
                print(row.line(), file=sys.stderr, flush=True)
    table = "\n".join([*ROW_HEAD, *(row.line() for row in rows)])
    if given.markdown:
        Path(given.markdown).write_text(table + "\n")
    print(table)
    return int(not all(row.good for row in rows))


if __name__ == "__main__":
    sys.exit(main())
