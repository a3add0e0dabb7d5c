"""Tables of what was converted: ONNX files, SavedModels, the ONNX package's material, the memory of a conversion."""

from __future__ import annotations

from typing import Any


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
