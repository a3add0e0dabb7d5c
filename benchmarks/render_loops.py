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
        f"transformers {result['transformers']}, allocator {result['allocator'] or 'as torch sets it'}, "
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
        most = _most_reserved(row)
        found = {**row, "reserved_bytes": most}
        cells += [f"{found[key] / 1e6:,.0f} MB" if found.get(key) else "" for key in kinds]
        if budget and most > budget:
            cells[-1] += ", over"
        ratio = f"{row['seconds'] / whole['seconds']:.3f}" if "seconds" in whole else ""
        pairs = [*zip(row.get("losses", ()), eager.get("losses", ()), strict=False)]
        apart = f"{max(abs(one - other) for one, other in pairs):.1e}" if pairs else ""
        cells += [f"{1e3 * row['seconds']:,.1f} ms", ratio, f"{row['first_step_seconds']:,.0f} s", apart]
        if varied:
            cells += [str(row.get("graphs", "")), str(row["waits"]), f"{sum(row.get('loss_seconds', ())):,.0f} s"]
        lines.append(f"| {row['row']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def loops_table(results: list[dict[str, Any]]) -> str:
    """Several models' loops: a row for each, with what memopt takes of torch.compile's time at each share of it."""
    shares = sorted({row["row"] for result in results for row in result["rows"] if row["row"].startswith("memopt:")})
    shares.reverse()
    told = {
        (result["machine"], result["torch"], result["transformers"], result["allocator"] or "as torch sets it")
        for result in results
    }
    lines = [
        "; ".join(
            f"{one}, torch {two}, transformers {three}, allocator {four}" for one, two, three, four in sorted(told)
        )
        + ":",
        "",
        "| model | torch.compile | eager | " + " | ".join(f"{float(s.split(':')[1]):.0%}" for s in shares) + " |",
        "|---" * (3 + len(shares)) + "|",
    ]
    for result in results:
        rows, settings = {row["row"]: row for row in result["rows"]}, result["settings"]
        whole, eager = rows["compile"], rows.get("eager", {})
        sizes = ", ".join(f"{key} {settings[key]}" for key in ("batch", "length") if key in settings)
        cells = [
            f"{result['model']}, {sizes}",
            f"{1e3 * whole['seconds']:,.1f} ms, {whole['reserved_bytes'] / 1e6:,.0f} MB",
            f"{eager['seconds'] / whole['seconds']:.2f}, {eager['reserved_bytes'] / 1e6:,.0f} MB" if eager else "",
            *(_share_cell(rows.get(share), whole) for share in shares),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _share_cell(row: dict[str, Any] | None, whole: dict[str, Any]) -> str:
    if row is None:
        return ""
    if "seconds" not in row:
        return "refused" if row["reason"].startswith("refused") else "not planned in time"
    most = _most_reserved(row)
    over = ", over" if most > row["budget_bytes"] else ""
    return f"{row['seconds'] / whole['seconds']:.2f}, {most / 1e6:,.0f} of {row['budget_bytes'] / 1e6:,.0f} MB{over}"


def _most_reserved(row: dict[str, Any]) -> int:
    """Bytes of the whole process: in older files who planned a later step had set the most back."""
    return max(row.get("reserved_bytes", 0), row.get("first_step_reserved_bytes", 0))


def library_table(result: dict[str, Any]) -> str:
    """Loops of training libraries: a row for each alone, and for each within a share of what that reserved."""
    rows = {row["row"]: row for row in result["rows"]}
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines = [
        f"{result['machine']}; {versions}:",
        "",
        "| loop | budget | reserved | step | first step | largest difference of a loss |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in rows.items():
        loop, _, share = name.partition(":")
        alone = rows.get(loop, {})
        if "failed" in found:
            lines.append(f"| {name} | | {found['failed']} | | | |")
            continue
        budget, apart, ratio = "", "", ""
        if share and "failed" not in alone:
            kept = "" if found["reserved"] <= found["budget"] else " **over**"
            budget, ratio = f"{found['budget'] / 1e6:,.0f} MB{kept}", f" ({found['step'] / alone['step']:.2f})"
            pairs = zip(found["losses"], alone["losses"], strict=True)
            apart = f"{max(abs(one - other) / abs(other) for one, other in pairs):.1e}"
        step = f"{found['step'] * 1e3:.0f} ms{ratio}"
        lines.append(
            f"| {name} | {budget} | {found['reserved'] / 1e6:,.0f} MB | {step} | {found['first']:.0f} s | {apart} |"
        )
    return "\n".join(lines) + "\n"
