"""Write the results under benchmarks/results into the README, between the marks that name them.

A result that is too long for the README has a page of its own beside it, of the same name, which the README links to.

python benchmarks/render.py            rewrite the README and the pages (`make readme`)
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

from benchmarks.render_compare import compare_table  # noqa: E402 - found once the root is on the path

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


def conversions_table(result: dict[str, Any]) -> str:
    done = [row for row in result["rows"] if "refused" not in row]
    lines = [
        f"{len(done)} of {len(result['rows'])} models converted, each compared with PyTorch at every size named: "
        f"torch {result['torch']}, transformers {result['transformers']}, small configs with random weights.",
        "",
        "| | model | nodes as exported | nodes written | compared at | largest difference, of the largest value |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        if "refused" in row:
            lines.append(f"| {row['kind']} | {row['model']} | | | refused: {row['refused']} | |")
            continue
        sizes = "; ".join(", ".join(f"{label} {size}" for label, size in run.items()) for run in row["runs"])
        counts = f"{row['nodes_before']:,} | {row['nodes_after']:,}"
        lines.append(f"| {row['kind']} | {row['model']} | {counts} | {sizes} | {row['max_relative']:.1e} |")
    return "\n".join(lines) + "\n"


def tensorflow_table(result: dict[str, Any]) -> str:
    done = [row for row in result["rows"] if "refused" not in row]
    libraries = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    lines = [
        f"{len(done)} of {len(result['rows'])} models written as SavedModels that TensorFlow compiles with XLA, each "
        f"run by TensorFlow at every batch size named and compared with PyTorch in float64: {result['machine']}, "
        f"{result['threads']} thread, other work on the machine, {libraries}; {result['settings']['size']}.",
        "",
        "| | model | batch | error | PyTorch's own | compile | temporaries |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        if "refused" in row:
            lines.append(f"| {row['kind']} | {row['model']} | | refused: {row['refused']} | | | |")
            continue
        sizes = ", ".join("fixed" if size is None else str(size) for size in row["batches"])
        sizes = f"fixed at {sizes}" if row["notes"] else sizes
        own = "" if row["torch_error"] is None else f"{row['torch_error']:.1e}"
        temporaries = f"{row['memory']['temporaries'] / 1e3:,.1f} kB"
        lines.append(
            f"| {row['kind']} | {row['model']} | {sizes} | {row['error']:.1e} | {own} "
            f"| {row['compile_seconds']:.1f} s | {temporaries} |"
        )
    notes = [f"{row['model']}: {note}" for row in done for note in row["notes"]]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)]).rstrip() + "\n"


# By the first word of a result's name: what stands in the README, and what has a page of its own.


def onnx_table(result: dict[str, Any]) -> str:
    """One line a model, one column an engine: nodes, file, memory, latency as a ratio to plain export's."""
    versions, settings = result["versions"], result["settings"]
    engines = list(dict.fromkeys(row["engine"] for row in result["rows"]))
    names = list(dict.fromkeys(row["model"] for row in result["rows"]))
    rows = {(row["model"], row["engine"]): row for row in result["rows"]}
    runtime = "onnxruntime-gpu" if "onnxruntime-gpu" in versions else "onnxruntime"
    known = [runtime, *(name for name in ("torch", "onnxsim", "onnxslim", "optimum-onnx") if name in versions)]
    title = ", ".join(f"{name} {versions[name]}" for name in known)
    where = "1 thread" if result["device"] == "cpu" else f"driver {result['driver']}, CUDA provider"
    lines = [
        f"{result['machine']}, {where}, {title}; batch 1, least of {settings['rounds']} medians. Nodes · MB of the "
        "file · MB while it runs · latency as a ratio to `torch`:",
        "",
        f"| | {' | '.join(f'`{engine}`' for engine in engines)} |",
        "|---" * (1 + len(engines)) + "|",
    ]
    for name in names:
        plain = rows[name, "torch"].get("seconds")
        cells = [_onnx_cell(rows.get((name, engine), {}), plain) for engine in engines]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in result["rows"]:
        if "failed" in row:
            reasons.setdefault((row["engine"], row["failed"].rpartition("Error: ")[2]), []).append(row["model"])
    if reasons:
        told = (f"`{engine}` for {', '.join(models)}: {why}" for (engine, why), models in reasons.items())
        lines += ["", "No figures of " + "; ".join(told) + "."]
    return "\n".join(lines) + "\n"


def _onnx_cell(row: dict[str, Any], plain: float | None) -> str:
    if "seconds" not in row or "failed" in row:
        return "none"
    ratio = f"{row['seconds'] / plain:.2f}" if plain else f"{row['seconds'] * 1e3:.2f} ms"
    return f"{row['nodes']:,} · {row['file_bytes'] / 1e6:,.1f} · {row['peak_bytes'] / 1e6:,.0f} · {ratio}"


def inference_table(result: dict[str, Any]) -> str:
    """A line for each model: median latency, what torch's allocator reserved, and what the process took, by row."""
    settings = result["settings"]
    found = {(row["model"], row["row"]): row for row in result["rows"]}
    kinds = list(dict.fromkeys(kind for _, kind in found))
    lines = [
        f"{result['machine']}, driver {result['driver']}, torch {result['torch']}, {settings['dtype']}, "
        f"median of {settings['repeats']} calls; ms, MiB reserved, MiB of the process:",
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
    return ", ".join((f"{row['seconds'] * 1e3:.2f}", *sizes))


def material_table(result: dict[str, Any]) -> str:
    """What came of each case of the ONNX package's own material."""
    kinds = ("equal", "as it was", "refused", "undecided", "different")
    lines = [
        f"onnx {result['onnx']}, onnxruntime {result['onnxruntime']}, {result['machine']}; equal to the shipped "
        "outputs, the very bytes that went in, refused in one line without a file, or anything else:",
        "",
        f"| | cases | {' | '.join(kinds)} |",
        "|---" * (2 + len(kinds)) + "|",
    ]
    for row in result["rows"]:
        counts = " | ".join(f"{row[kind]:,}" for kind in kinds)
        lines.append(f"| {row['material']} | {row['cases']:,} | {counts} |")
    return "\n".join(lines) + "\n"


def memory_table(result: dict[str, Any]) -> str:
    """The host memory of a conversion as a multiple of the weights."""
    lines = [
        f"A safetensors checkpoint to ONNX, {result['machine']}, torch {result['torch']}; the most that was held:",
        "",
        "| weights | peak | of the weights | without pages of files | seconds |",
        "|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        sizes = f"{row['weights_bytes'] / 1e9:.2f} GB | {row['peak_bytes'] / 1e9:.2f} GB"
        shares = f"{row['peak_over_weights']:.2f} | {row['anonymous_over_weights']:.2f}"
        lines.append(f"| {sizes} | {shares} | {row['seconds']:.0f} |")
    return "\n".join(lines) + "\n"


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
            why = row.get("failure") or f"refused: the least is {row['minimum_bytes'] / 1e3:,.0f} kB"
            lines.append(f"| {row['model']} | {share} | {why} | | | |")
            continue
        sizes = [f"{row[key] / 1e3:,.0f}" for key in ("peak_bytes", "temporaries_bytes")]
        lines.append(
            f"| {row['model']} | {share} | {' | '.join(sizes)} | {row['executables']} | {row['gradient_error']:.1e} |"
        )
    return "\n".join(lines) + "\n"


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
        shared = f"{row['shared']} of {row['crossed']}" if "crossed" in row else ""
        lines.append(
            f"{name} {row['seconds'] * 1e3:.2f} | {held} | {row['process_bytes'] / 1e6:,.0f} | {shared} | "
            f"{row['error']:.1e} | {row['first_call_seconds']:.0f} s |"
        )
    return "\n".join(lines) + "\n"


TABLES = {
    "inference": inference_table,
    "material": material_table,
    "memory": memory_table,
    "xla": xla_table,
    "xlagpu": xlagpu_table,
    "step": step_table,
    "planning": planning_table,
    "packing": packing_table,
    "training": training_table,
    "optimizers": optimizers_table,
    "arena": arena_table,
    "compare": compare_table,
    "onnx": onnx_table,
}
PAGES = {"tensorflow": tensorflow_table, "conversions": conversions_table}


def rendered(text: str) -> str:
    """The README with every table made anew."""

    def fill(match: re.Match[str]) -> str:
        result = json.loads((RESULTS / match["name"]).read_text())
        return match[1] + TABLES[match["name"].split("_")[0].removesuffix(".json")](result) + match[3]

    return MARK.sub(fill, text)


def texts() -> dict[Path, str]:
    """Every file that is made of results, as it should be."""
    readme = ROOT / "README.md"
    found = {readme: rendered(readme.read_text())}
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
