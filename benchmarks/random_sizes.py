"""Random modules at five sizes of batch and length beside eager: planned with symbols for the sizes that vary.

python -m benchmarks.random_sizes --first 0 --programs 300 --output benchmarks/results/sizes.md
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

import memopt
from tests.random_sizes import compared, sized_program


def judged(number: int, budget: str) -> tuple[str, str]:
    """How a program went in a word or two, and what there is to say of it."""
    torch._dynamo.reset()
    dynamic = None if number % 2 else True
    try:
        run, differences = compared(number, lambda model: memopt.compile(model, budget, dynamic=dynamic))
        notes = " / ".join(run.report.notes)
    except Exception as error:
        return "fails", "".join(traceback.format_exception(error)[-3:])
    if differences:
        return "differs", "; ".join(differences[:3])
    graphs = run._memopt.sessions.graphs
    kind = "equal, sizes by themselves" if "each by itself" in notes else "equal"
    return f"{kind}, {graphs if graphs < 4 else 'more'} graphs", notes


def main() -> int:
    """Run them, and write how many went how."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--programs", type=int, default=300)
    parser.add_argument("--budget", default="1GB")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[int]] = collections.defaultdict(list)
    lines: list[str] = []
    for number in range(given.first, given.first + given.programs):
        how, said = judged(number, given.budget)
        found[how].append(number)
        print(number, how, said.strip(), flush=True)
        if not how.startswith("equal"):
            lines.append(f"- {number} {how}: `{said.strip().splitlines()[-1]}`")
            print(sized_program(number).source, flush=True)
        if given.output:
            with contextlib.suppress(OSError):
                given.output.write_text(written(given, found, lines))
    return int(bool(lines))


def written(given: Any, found: dict[str, list[int]], lines: list[str]) -> str:
    """The page of the results."""
    total = sum(map(len, found.values()))
    rows = [f"| {how} | {len(numbers)} |" for how, numbers in sorted(found.items())]
    return "\n".join(
        [
            "# Random modules at five sizes",
            "",
            f"`python -m benchmarks.random_sizes --first {given.first} --programs {total} --budget {given.budget}` on",
            f"torch {torch.__version__}: losses, outputs, gradients and buffers beside eager's at five sizes of batch",
            "and length, odd numbers with sizes found out, even ones with `dynamic=True`.",
            "",
            "| | programs |",
            "|---|---|",
            *rows,
            "",
            *lines,
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
