"""The tables of benchmarks/user_loop.py: whole loops, and what their processes reserved from their first byte on."""

from __future__ import annotations

from typing import Any


def loop_table(result: dict[str, Any]) -> str:
    """One model's loop: a row for each engine and budget, over the budget where it was."""
    settings, rows = result["settings"], {row["row"]: row for row in result["rows"]}
    sizes = ", ".join(f"{key} {settings[key]}" for key in ("batch", "length") if key in settings)
    varied = settings.get("pairs", 0)
    eager, whole = rows.get("eager", {}), rows.get("compile_dynamic" if varied else "compile", {})
    if varied:
        sizes = f"{varied} sizes of batch and length, the largest {sizes}; of steps the mean once code is there"
    head = f"| of torch.compile{'(dynamic=True)' if varied else ''}'s | first step | losses from eager's |"
    lines = [
        f"{result['model']}, {sizes}; {result['machine']}, {result['cores']} cores, torch {result['torch']}, "
        f"transformers {result['transformers']}, allocator {result['allocator']}, "
        f"rows prepared {settings['jobs']} at a time:",
        "",
        "| | budget | predicted | allocated | reserved in the first step | reserved in all | step "
        + head
        + (" graphs | steps that waited for code | all steps once, waits included |" if varied else ""),
        "|---" * (13 if varied else 10) + "|",
    ]
    for row in result["rows"]:
        budget = row.get("budget_bytes")
        cells = [f"{budget / 1e6:,.0f} MB" if budget else ""]
        if "seconds" not in row:
            lines.append(f"| {row['row']} | {cells[0]} | {row['reason']} |{' |' * (10 if varied else 7)}")
            continue
        kinds = ("predicted_bytes", "allocated_bytes", "first_step_reserved_bytes", "reserved_bytes")
        cells += [f"{row[key] / 1e6:,.0f} MB" if row.get(key) else "" for key in kinds]
        if budget and row.get("reserved_bytes", 0) > budget:
            cells[-1] += ", over"
        ratio = f"{row['seconds'] / whole['seconds']:.3f}" if "seconds" in whole else ""
        pairs = [*zip(row.get("losses", ()), eager.get("losses", ()), strict=False)]
        apart = f"{max(abs(one - other) for one, other in pairs):.1e}" if pairs else ""
        cells += [f"{1e3 * row['seconds']:,.1f} ms", ratio, f"{row['first_step_seconds']:,.0f} s", apart]
        if varied:
            cells += [str(row.get("graphs", "")), str(row["waits"]), f"{sum(row.get('loss_seconds', ())):,.0f} s"]
        lines.append(f"| {row['row']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
