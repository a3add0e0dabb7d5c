"""The tables of benchmarks/user_loop.py: whole loops, and what their processes reserved from their first byte on."""

from __future__ import annotations

from typing import Any


def loop_table(result: dict[str, Any]) -> str:
    """One model's loop: a row for each engine and budget, over the budget where it was."""
    settings, rows = result["settings"], {row["row"]: row for row in result["rows"]}
    sizes = ", ".join(f"{key} {settings[key]}" for key in ("batch", "length") if key in settings)
    eager, whole = rows.get("eager", {}), rows.get("compile", {})
    lines = [
        f"{result['model']}, {sizes}; {result['machine']}, {result['cores']} cores, torch {result['torch']}, "
        f"transformers {result['transformers']}, allocator {result['allocator']}, "
        f"rows prepared {settings['jobs']} at a time:",
        "",
        "| | budget | predicted | allocated | reserved in the first step | reserved in all | step | of torch.compile's "
        "| first step | losses from eager's |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        budget = row.get("budget_bytes")
        cells = [f"{budget / 1e6:,.0f} MB" if budget else ""]
        if "seconds" not in row:
            lines.append(f"| {row['row']} | {cells[0]} | {row['reason']} |{' |' * 7}")
            continue
        kinds = ("predicted_bytes", "allocated_bytes", "first_step_reserved_bytes", "reserved_bytes")
        cells += [f"{row[key] / 1e6:,.0f} MB" if row.get(key) else "" for key in kinds]
        if budget and row.get("reserved_bytes", 0) > budget:
            cells[-1] += ", over"
        ratio = f"{row['seconds'] / whole['seconds']:.3f}" if "seconds" in whole else ""
        pairs = [*zip(row.get("losses", ()), eager.get("losses", ()), strict=False)]
        apart = f"{max(abs(one - other) for one, other in pairs):.1e}" if pairs else ""
        cells += [f"{1e3 * row['seconds']:,.1f} ms", ratio, f"{row['first_step_seconds']:,.0f} s", apart]
        lines.append(f"| {row['row']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
