"""Write the results under benchmarks/results into the README and docs/, between the marks that name them.

The README has the main one, docs/guide.md those of conversions, docs/results.md the rest, `brief` where that is marked.
A table that is too long for these has a page of its own beside the result, of the same name, which they link to.

python benchmarks/render.py            rewrite README, docs/results.md and the pages (`make readme`)
python benchmarks/render.py --check    exit 1 when one of them and the results disagree
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.render_budgets import budgets_table  # noqa: E402 - found once the root is on the path
from benchmarks.render_classes import classes_table, modules_table  # noqa: E402
from benchmarks.render_compare import brief_compare_table, compare_table  # noqa: E402
from benchmarks.render_conversions import (  # noqa: E402
    conversions_table,
    material_table,
    memory_table,
    onnx_table,
    tensorflow_table,
)
from benchmarks.render_loops import library_table, loop_table, loops_table  # noqa: E402
from benchmarks.render_training import first_step_table, paired_table, ratios_table, training_table  # noqa: E402
from benchmarks.render_two_gpus import two_gpus_table  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "guide.md", ROOT / "docs" / "results.md")
MARK = re.compile(r"(<!-- results: (?P<name>[\w.]+)(?P<brief> brief)? -->\n).*?(?P<end><!-- end -->)", re.DOTALL)
# Several results in one table.
RATIOS = re.compile(r"(<!-- (?P<kind>ratios|loops): (?P<names>[\w. ]+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)


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
            least = f"refused: the minimum is {row['minimum_bytes'] / 1e6:,.0f} MB"
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


def hard_packing_table(result: dict[str, Any]) -> str:
    kinds = list(result["rows"][0]["by_kind"])
    lines = [
        f"{result['machine']}, {result['threads']} core, Python {result['python']}; lists packed within the seconds:",
        "",
        f"| without | seconds for each list | packed | {' | '.join(kinds)} | median seconds of those packed |",
        f"|{'---|' * (4 + len(kinds))}",
    ]
    for run in result["rows"]:
        counts = " | ".join(run["by_kind"][kind] for kind in kinds)
        lines.append(
            f"| {', '.join(run['without']) or 'nothing'} | {run['settings']['seconds']:g} "
            f"| {run['packed']} of {run['of']} | {counts} | {run['median_seconds']:.1f} |"
        )
    return "\n".join(lines) + "\n"


def optimizers_table(result: dict[str, Any]) -> str:
    settings = result["settings"]
    lines = [
        f"{result['machine']}, driver {result['driver']}, torch {result['torch']}; the most of {settings['steps']} "
        "steps, and beside it what the optimizer holds and takes while it steps, predicted / measured, in MB:",
        "",
        "| | engine | budget | predicted | allocated | error | reserved | state | optimizer's step |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        sizes = ", ".join(str(row[key]) for key in ("batch", "sequence", "resolution", "dtype") if key in row)
        name = f"{row['model']} ({sizes}), {row['optimizer']}"
        if "error" in row:
            lines.append(f"| {name} | {row['backend']} | {row['error']} | | | | | | |")
            continue
        kinds = ("budget_bytes", "predicted_bytes", "peak_bytes", "reserved_bytes")
        budget, predicted, real, reserved = (f"{row[key] / 1e6:,.0f}" for key in kinds)
        pairs = (("state_predicted_bytes", "state_bytes"), ("step_predicted_bytes", "step_peak_bytes"))
        own = [f"{row[counted] / 1e6:,.1f} / {row[found] / 1e6:,.1f}" for counted, found in pairs]
        error = f"{row['predicted_bytes'] / row['peak_bytes'] - 1:+.2%}"
        cells = [row["backend"], budget, predicted, real, error, reserved, *own]
        lines.append(f"| {name} | {' | '.join(cells)} |")
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
        found = [row.get(f"{kind}_bytes") for kind in kinds]
        cells = ["" if size is None else f"{size / 1e6:,.2f}" for size in found]
        if "static_seconds" in row:
            times = [f"{row[f'{engine}_seconds'] * 1e3:,.0f} ms" for engine in ("eager", "static")]
            cells += [f"{row['allocated_beside_results']:,} B", *times]
        else:
            cells += [""] * 3  # planned only: its weights are too large for the machine
        lines.append(f"| {row['model']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def inference_table(result: dict[str, Any]) -> str:
    """A line for each model: median latency, what torch's allocator reserved, and what the process took, by row."""
    settings = result["settings"]
    found = {(row["model"], row["row"]): row for row in result["rows"]}
    kinds = list(dict.fromkeys(kind for _, kind in found))
    lines = [
        f"{result['machine']}, driver {result['driver']}, torch {result['torch']}, {settings['dtype']}, "
        f"median of {settings['repeats']} calls; ms (of these in kernels), MiB reserved, MiB of the process:",
        "",
        f"| | {' | '.join(kinds)} |",
        "|---" * (len(kinds) + 1) + "|",
    ]
    for model in dict.fromkeys(model for model, _ in found):
        sizes = ", ".join(str(size) for size in settings["sizes"].get(model, {}).values())
        cells = [_latency_and_memory(found.get((model, kind), {})) for kind in kinds]
        lines.append(f"| {model} {sizes} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _latency_and_memory(row: dict[str, Any]) -> str:
    if "seconds" not in row:
        return row.get("error_text", "")[:60].replace("|", "/")
    sizes = [f"{row[key] / 2**20:,.0f}" for key in ("reserved_bytes", "process_bytes") if key in row]
    inside = f" ({row['kernel_seconds'] * 1e3:.2f})" if "kernel_seconds" in row else ""
    return ", ".join((f"{row['seconds'] * 1e3:.2f}{inside}", *sizes))


def xla_table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['machine']}, {result['threads']} threads, torch {result['torch']}, jax {result['jax']}; kB by XLA's "
        "own analysis, errors relative to the largest value:",
        "",
        "| inference | arguments | results | temporaries | error beside float64 | PyTorch's own | first call |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        if row["mode"] == "inference" and "failure" in row:
            lines.append(f"| {row['model']} | {row['failure']} | | | | | |")
        elif row["mode"] == "inference":
            sizes = [f"{row[f'{kind}_bytes'] / 1e3:,.0f}" for kind in ("arguments", "outputs", "temporaries")]
            errors = f"{row['error']:.1e} | {row['eager_error']:.1e}"
            lines.append(f"| {row['model']} | {' | '.join(sizes)} | {errors} | {row['seconds']:.1f} s |")
    lines += [
        "",
        "| training | budget | whole step | largest temporaries | executables | gradient difference |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        if row["mode"] != "training":
            continue
        share = "none" if row.get("share") is None else f"{row['share']:.0%}: {row['budget_bytes'] / 1e3:,.0f} kB"
        if "peak_bytes" not in row:
            why = row.get("failure") or f"refused: the minimum is {row['minimum_bytes'] / 1e3:,.0f} kB"
            lines.append(f"| {row['model']} | {share} | {why}{_bound(row)} | | | |")
            continue
        sizes = [f"{row[key] / 1e3:,.0f}" for key in ("peak_bytes", "temporaries_bytes")]
        lines.append(
            f"| {row['model']} | {share} | {' | '.join(sizes)} | {row['executables']} | {row['gradient_error']:.1e} |"
        )
    return "\n".join(lines) + "\n"


def _bound(row: dict[str, Any]) -> str:
    """What a refused step holds at least, where that is more than its budget."""
    least = row.get("least")
    if least is None:
        return ""
    parts = [least[key] for key in ("resident_bytes", "gradients_bytes", "operands_bytes")]
    if sum(parts) <= row["budget_bytes"]:
        return ""
    held, made, read = (f"{part / 1e3:,.0f}" for part in parts)
    name = least["operator"].removeprefix("aten.").removesuffix(".default")
    terms = f"{held} model and inputs + {made} gradients + {read} read by `{name}`"
    return f"; operators one by one, in autograd's order, hold {terms} = {sum(parts) / 1e3:,.0f} kB or more"


def xlagpu_table(result: dict[str, Any]) -> str:
    sizes = "; ".join(
        f"{model} {', '.join(f'{name} {size}' for name, size in one.items())}"
        for model, one in result["settings"]["sizes"].items()
    )
    lines = [
        f"{result['machine']}, driver {result['driver']}, torch {result['torch']}, jax {result['jax']}; "
        f"{result['settings']['dtype']}, no dropout; {sizes}; median of {result['settings']['repeats']} calls:",
        "",
        "| | engine | ms | MB: PyTorch's allocator + XLA's | process | exchanged in place | error | first call |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(result["rows"], key=lambda row: (row["model"], row["mode"])):
        name = f"| {row['model']}, {row['mode']} | {row['row']} |"
        if "seconds" not in row:
            lines.append(f"{name} {row['error_text']} | | | | | |")
            continue
        held = f"{row['torch_bytes'] / 1e6:,.0f}"
        held += f" + {row['xla_bytes'] / 1e6:,.0f}" if "xla_bytes" in row else ""
        held += f" ({row['analysed_bytes'] / 1e6:,.0f})" if "analysed_bytes" in row else ""
        shared = f"{row['shared']} of {row['crossed']}" if "crossed" in row else ""
        lines.append(
            f"{name} {row['seconds'] * 1e3:.2f} | {held} | {row['process_bytes'] / 1e6:,.0f} | {shared} | "
            f"{row['error']:.1e} | {row['first_call_seconds']:.0f} s |"
        )
    return "\n".join(lines) + "\n"


def lengths_table(result: dict[str, Any]) -> str:
    """A loop over batches of many lengths: seconds in all, and of its later steps."""
    lines = [
        f"{result['machine']}, {result['cores']} cores, torch {result['torch']}:",
        "",
        "| | in all | a later step, median | the largest step's peak | budget |",
        "|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        if "error" in row:
            lines.append(f"| {row['row']} | {row['error']} | | | |")
            continue
        later = statistics.median(row["seconds"][len(row["seconds"]) // 2 :])
        peak, budget = (f"{row[key] / 1e6:,.1f} MB" if key in row else "" for key in ("peak_bytes", "budget_bytes"))
        lines.append(f"| {row['row']} | {sum(row['seconds']):.1f} s | {later * 1e3:.1f} ms | {peak} | {budget} |")
    return "\n".join(lines) + "\n"


# By the first word of a result's name: what stands between marks, and what has a page of its own.
def monitor_table(result: dict[str, Any]) -> str:
    count = result["threads"]
    lines = [
        f"{result['machine']}, {count} thread{'' if count == 1 else 's'}, torch {result['torch']}; medians:",
        "",
        "| model | batch | step | with the monitor | more | entering and leaving |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        times = f"{row['milliseconds']:,.1f} ms | {row['monitored_milliseconds']:,.1f} ms | {row['added']:+.0%}"
        around = row["enter_and_leave_milliseconds"]
        lines.append(f"| {row['model']} | {row['batch']} | {times} | {around:,.0f} ms |")
    return "\n".join(lines) + "\n"


TABLES = {
    "userloop": loop_table,
    "library": library_table,
    "two": two_gpus_table,
    "inference": inference_table,
    "material": material_table,
    "memory": memory_table,
    "xla": xla_table,
    "xlagpu": xlagpu_table,
    "step": step_table,
    "planning": planning_table,
    "packing": packing_table,
    "lengths": lengths_table,
    "hardpacking": hard_packing_table,
    "training": training_table,
    "first": first_step_table,
    "paired": paired_table,
    "optimizers": optimizers_table,
    "arena": arena_table,
    "budgets": budgets_table,
    "compare": compare_table,
    "onnx": onnx_table,
    "modules": modules_table,
    "monitor": monitor_table,
}
BRIEF = {"compare": brief_compare_table}
PAGES = {"classes": classes_table, "tensorflow": tensorflow_table, "conversions": conversions_table}


def rendered(text: str) -> str:
    """A document with every table made anew."""

    def fill(match: re.Match[str]) -> str:
        result = json.loads((RESULTS / match["name"]).read_text())
        tables = BRIEF if match["brief"] else TABLES
        return match[1] + tables[match["name"].split("_")[0].removesuffix(".json")](result) + match["end"]

    def compare(match: re.Match[str]) -> str:
        results = [json.loads((RESULTS / name).read_text()) for name in match["names"].split()]
        return match[1] + {"ratios": ratios_table, "loops": loops_table}[match["kind"]](results) + match["end"]

    return RATIOS.sub(compare, MARK.sub(fill, text))


def texts() -> dict[Path, str]:
    """Every file that is made of results, as it should be."""
    found = {document: rendered(document.read_text()) for document in DOCUMENTS}
    for path in sorted(RESULTS.glob("*.json")):
        table = PAGES.get(path.stem.split("_")[0])
        if table is not None:
            found[path.with_suffix(".md")] = table(json.loads(path.read_text()))
    return found


def main() -> int:
    wrong = [(path, text) for path, text in texts().items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv[1:]:
        for path, _ in wrong:
            print(f"{path.relative_to(ROOT)} and benchmarks/results disagree: run make readme", file=sys.stderr)
        return int(bool(wrong))
    for path, text in wrong:
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
