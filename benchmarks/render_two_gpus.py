"""The table of benchmarks/two_gpus.py: the worst rank of each row, over its whole life."""

from __future__ import annotations

from typing import Any


def two_gpus_table(result: dict[str, Any]) -> str:
    """A row for each way to train on two devices, against the compiled one of its kind."""
    settings, rows = result["settings"], {row["row"]: row for row in result["rows"]}
    lines = [
        f"{result['model']}, batch {settings['batch']}, length {settings['length']} a rank; {result['machine']}, "
        f"torch {result['torch']}, transformers {result['transformers']}, default allocator settings:",
        "",
        "| | budget | least | predicted | allocated | reserved | step | of torch.compile's | caches handed back a step "
        "| first step | last loss |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        sizes = ("budget_bytes", "minimum_bytes", "predicted_bytes", "allocated_bytes", "reserved_bytes")
        cells = [f"{row[key] / 1e6:,.0f} MB" if row.get(key) else "" for key in sizes]
        if "seconds" not in row:
            lines.append(f"| {row['row']} | {cells[0]} | {row['reason']} |{' |' * 8}")
            continue
        if row.get("budget_bytes") and row["reserved_bytes"] > row["budget_bytes"]:
            cells[-1] += ", over"
        whole = rows.get(f"{row['row'].partition('_')[0]}_compile", {})
        ratio = f"{row['seconds'] / whole['seconds']:.2f}" if "seconds" in whole else ""
        cells += [f"{1e3 * row['seconds']:,.0f} ms", ratio, f"{row['retries'] / settings['repeats']:g}"]
        cells += [f"{row['first_step_seconds']:,.0f} s", f"{row['losses'][0][-1]:.4f}"]
        lines.append(f"| {row['row']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
