"""Write the results under benchmarks/results into the README, between the marks that name them.

python benchmarks/render.py            rewrite the README
python benchmarks/render.py --check    exit 1 when the README and the files disagree
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MARK = re.compile(r"(<!-- results: (?P<name>[\w.]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def step_table(result: dict[str, Any]) -> str:
    settings = result["settings"]
    sizes = [f"batch {settings['batch']}"]
    sizes += [f"{key} {settings[key]}" for key in ("sequence", "resolution") if settings.get(key) != "None"]
    threads = "" if settings["device"].startswith("cuda") else f", {result['threads']} threads"
    title = f"{settings['model']}, {', '.join(sizes)}, {settings['dtype']}; {result['machine']}{threads}, "
    lines = [
        title + f"torch {result['torch']}, backend `{settings['backend']}`, median of {settings['repeats']} steps:",
        "",
        "| | budget | predicted | measured | step | gradient difference |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        if "seconds" not in row:
            least = f"refused: the least is {row['minimum_bytes'] / 1e6:,.0f} MB"
            lines.append(f"| {row['setting']} | {row['budget_bytes'] / 1e6:,.0f} MB | {least} | | | |")
            continue
        cells = [
            f"{row[key] / 1e6:,.0f} MB" if key in row else ""
            for key in ("budget_bytes", "predicted_bytes", "peak_bytes")
        ]
        error = f"{row['gradient_error']:.1e}" if "gradient_error" in row else ""
        lines.append(f"| {row['setting']} | {' | '.join(cells)} | {row['seconds'] * 1e3:,.0f} ms | {error} |")
    return "\n".join(lines) + "\n"


def planning_table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['machine']}, {result['threads']} thread, torch {result['torch']}:",
        "",
        "| graph | nodes | operations | planning | least peak found |",
        "|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        lines.append(
            f"| {row['graph']} | {row['nodes']:,} | {row['operations']:,} | {row['seconds']:.1f} s "
            f"| {row['minimum_share']:.0%} of the unconstrained |"
        )
    return "\n".join(lines) + "\n"


def packing_table(result: dict[str, Any]) -> str:
    kinds = ("lower_bound_bytes", "greedy_bytes", "heuristic_bytes", "memopt_bytes")
    lines = [
        f"{result['machine']}, {result['threads']} core, Python {result['python']}, at most "
        f"{result['settings']['timeout']:g} s for each list; bytes as shares of its capacity:",
        "",
        "| list | buffers | lower bound | greedy by size | best heuristic | memopt | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        made = row["instance"].startswith("cut, ")
        groups.setdefault(f"cut rectangles of {row['buffers']}" if made else row["instance"], []).append(row)
    for name, rows in groups.items():
        shares = [[row[kind] / row["capacity"] for row in rows] for kind in kinds]
        cells = [f"{statistics.mean(share):.3f}" for share in shares]
        if len(rows) > 1:
            packed = sum(row["memopt_bytes"] <= row["capacity"] for row in rows)
            name = f"{len(rows)} {name}, {packed} packed; means"
        seconds = statistics.mean(row["seconds"] for row in rows)
        lines.append(f"| {name} | {rows[0]['buffers']:,} | {' | '.join(cells)} | {seconds:.1f} |")
    return "\n".join(lines) + "\n"


def training_table(result: dict[str, Any]) -> str:
    settings = result["settings"]
    sizes = [f"batch {settings['batch']}"]
    sizes += [f"{key} {settings[key]}" for key in ("sequence", "resolution") if key in settings]
    lines = [
        f"{settings['model']}, {', '.join(sizes)}, {settings['dtype']}; {result['machine']}, torch {result['torch']}, "
        f"`{result['allocator']}`, median of {settings['repeats']} steps, {settings['jobs']} rows compiled at a time:",
        "",
        "| | budget | predicted | allocated | reserved | step | first step |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        budget = f"{row['budget_bytes'] / 1e6:,.0f} MB" if "budget_bytes" in row else ""
        if "seconds" not in row:
            why = row.get("error") or f"refused: the least is {row['minimum_bytes'] / 1e6:,.0f} MB"
            lines.append(f"| {row['row']} | {budget} | {why} | | | | |")
            continue
        kinds = ("predicted_bytes", "peak_bytes", "reserved_bytes")
        cells = [f"{row[key] / 1e6:,.0f} MB" if key in row else "" for key in kinds]
        mark = "¹" if any("operator by operator" in note for note in row.get("notes", ())) else ""
        times = f"{row['seconds'] * 1e3:,.0f} ms{mark} | {row['first_step_seconds']:,.0f} s"
        lines.append(f"| {row['row']} | {budget} | {' | '.join(cells)} | {times} |")
    return "\n".join(lines) + "\n"


def arena_table(result: dict[str, Any]) -> str:
    kinds = ("sum", "eager_peak", "given_order", "reordered", "joined", "arena", "greedy_by_size")
    heads = ("sum of tensors", "eager", "given order", "reordered", "joined", "arena", "greedy by size")
    lines = [
        f"{result['machine']}, {result['threads']} thread, torch {result['torch']}; MB:",
        "",
        f"| model and batch | {' | '.join(heads)} | allocated beside results | eager | static |",
        "|---" * (len(heads) + 4) + "|",
    ]
    for row in result["rows"]:
        cells = [f"{row[f'{kind}_bytes'] / 1e6:,.2f}" for kind in kinds]
        times = [f"{row[f'{engine}_seconds'] * 1e3:,.0f} ms" for engine in ("eager", "static")]
        lines.append(
            f"| {row['model']} | {' | '.join(cells)} | {row['allocated_beside_results']:,} B | {' | '.join(times)} |"
        )
    return "\n".join(lines) + "\n"


TABLES = {
    "step": step_table,
    "planning": planning_table,
    "packing": packing_table,
    "training": training_table,
    "arena": arena_table,
}


def rendered(text: str) -> str:
    def fill(match: re.Match[str]) -> str:
        result = json.loads((RESULTS / match["name"]).read_text())
        return match[1] + TABLES[match["name"].split("_")[0]](result) + match[3]

    return MARK.sub(fill, text)


def main() -> int:
    readme = ROOT / "README.md"
    text = readme.read_text()
    new = rendered(text)
    if "--check" in sys.argv[1:]:
        if new != text:
            print("README.md and benchmarks/results disagree: run python benchmarks/render.py", file=sys.stderr)
        return int(new != text)
    readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
