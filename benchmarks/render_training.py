"""The tables of results of benchmarks/training.py, by model and beside torch.compile, first_step.py and paired.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_SHARES = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3)
_LONGEST = 6  # phases of a first step that are told


def training_table(result: dict[str, Any]) -> str:
    parts = [key for key in ("planning_seconds", "compile_seconds") if any(key in row for row in result["rows"])]
    busy = any("kernels_seconds" in row for row in result["rows"])
    clock = any("clock_hz" in row for row in result["rows"])
    lines = [
        f"{_title(result)}; {_settings(result)}:",
        "",
        f"| | budget | predicted | allocated | reserved | step |{' kernels |' * busy}{' clock |' * clock} first step |"
        + "".join(f" {part.removesuffix('_seconds')} |" for part in parts),
        "|---" * (7 + busy + clock + len(parts)) + "|",
    ]
    for row in result["rows"]:
        budget = f"{row['budget_bytes'] / 1e6:,.0f} MB" if "budget_bytes" in row else ""
        if "seconds" not in row:
            # Without what torch says of every process on the device.
            why = row.get("error", "").partition(" GPU ")[0]
            why = why or f"refused: the minimum is {row['minimum_bytes'] / 1e6:,.0f} MB"
            lines.append(f"| {row['row']} | {budget} | {why} |{' |' * (4 + busy + clock + len(parts))}")
            continue
        kinds = ("predicted_bytes", "peak_bytes", "reserved_bytes")
        cells = [f"{row[key] / 1e6:,.0f} MB" if key in row else "" for key in kinds]
        if _is_captured(row) and "pooled_bytes" not in row:  # of what a CUDA graph writes to torch counts nothing
            cells[1] = "captured"
        cells += [f"{row['seconds'] * 1e3:,.1f} ms{_mark(row)}"]
        cells += [f"{row['kernels_seconds'] * 1e3:,.1f} ms" if "kernels_seconds" in row else ""] * busy
        cells += [f"{row['clock_hz'] / 1e6:,.0f} MHz" if "clock_hz" in row else ""] * clock
        cells += [f"{row['first_step_seconds']:,.0f} s"]
        cells += [f"{row[part]:,.0f} s" if part in row else "" for part in parts]
        lines.append(f"| {row['row']} | {budget} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def ratios_table(results: Sequence[dict[str, Any]]) -> str:
    """Times of a step as multiples of torch.compile's, by shares of what that reserves; and of the fastest peer there.

    A peer is compared where it reserves no more than the share: an engine that cannot be told a budget may do so.
    """
    jobs = sorted({result["settings"]["jobs"] for result in results})
    settings = sorted({_settings(result, jobs) for result in results})
    lines = [
        f"{'; '.join(settings)}:",
        "",
        "| model | | " + " | ".join(f"{100 * share:.0f} %" for share in _SHARES) + " | least |",
        "|---" * (len(_SHARES) + 3) + "|",
    ]
    for result in results:
        rows = {row["row"]: row for row in result["rows"]}
        whole = rows["compile"]
        peers = [row for name, row in rows.items() if not name.startswith("memopt") and "seconds" in row]
        own = [rows.get(f"memopt:{share}", {}) for share in _SHARES]
        least = rows.get("memopt:least", {})
        size = f" in {least['reserved_bytes'] / 1e6:,.0f} MB" if "seconds" in least else ""
        cells = " | ".join(_ratio(row, whole) for row in [*own, least])
        lines.append(f"| {_title(result)} | memopt | {cells}{size} |")
        kernels = " | ".join(_kernels(row, whole) for row in [*own, least])
        lines.append(f"| | its kernels | {kernels} |")
        limits = [share * whole["reserved_bytes"] for share in _SHARES]
        limits.append(least.get("reserved_bytes", 0) if "seconds" in least else 0)
        fastest = [_fastest(peers, limit, whole) for limit in limits]
        lines.append(f"| | fastest peer | {' | '.join(fastest)} |")
    return "\n".join(lines) + "\n"


def first_step_table(result: dict[str, Any]) -> str:
    """How long the first step of each process took, and of memopt's its longest phases."""
    lines = [
        f"{_title(result)}; {result['machine']}, {result['cores']} cores, torch {result['torch']}:",
        "",
        "| | caches | budget | first step | fastest step | longest phases |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        if "error" in row:
            lines.append(f"| {row['row']} | {row['cache']} | | {row['error']} | | |")
            continue
        budget = f"{row['budget_bytes'] / 1e6:,.0f} MB" if "budget_bytes" in row else ""
        longest = sorted(row.get("phases", {}).items(), key=lambda phase: -phase[1])[:_LONGEST]
        phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in longest)
        lines.append(
            f"| {row['row']} | {row['cache']} | {budget} | {row['first_step_seconds']:.1f} s "
            f"| {row['seconds'] * 1e3:,.1f} ms | {phases} |"
        )
    return "\n".join(lines) + "\n"


def paired_table(result: dict[str, Any]) -> str:
    """Steps of torch.compile and of memopt in turns, and the median of the ratios of each pair."""
    pairs = result["settings"]["pairs"]
    lines = [
        f"{_title(result)}; {result['machine']}, torch {result['torch']}, {pairs} pairs of steps:",
        "",
        "| | budget | reserved | median step | fastest step | launched in | pair by pair |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        sizes = [f"{row[key] / 1e6:,.0f} MB" if row.get(key) else "" for key in ("budget_bytes", "reserved_bytes")]
        times = [f"{row[key] * 1e3:,.1f} ms" for key in ("seconds", "fastest_seconds", "launched_seconds")]
        ratio = "{:.3f} ({:.3f} to {:.3f})".format(row["ratio"], *row["ratio_range"]) if "ratio" in row else ""
        lines.append(f"| {row['row']} | {' | '.join((*sizes, *times))} | {ratio} |")
    return "\n".join(lines) + "\n"


def _fastest(peers: Sequence[dict[str, Any]], limit: float, whole: dict[str, Any]) -> str:
    within = [row for row in peers if row["reserved_bytes"] <= limit]
    if not within:
        return "-"
    found = min(within, key=lambda row: row["seconds"])
    return f"{_ratio(found, whole)} {found['row']}"


def _ratio(row: dict[str, Any], whole: dict[str, Any]) -> str:
    if "seconds" in row:
        return f"{row['seconds'] / whole['seconds']:.2f}{_mark(row)}"
    return "refused" if "minimum_bytes" in row else "-"


def _kernels(row: dict[str, Any], whole: dict[str, Any]) -> str:
    both = "kernels_seconds" in row and "kernels_seconds" in whole
    return f"{row['kernels_seconds'] / whole['kernels_seconds']:.2f}" if both else "-"


def _is_captured(row: dict[str, Any]) -> bool:
    return any("captured as CUDA graphs" in note for note in row.get("notes", ()))


def _mark(row: dict[str, Any]) -> str:
    return "¹" if any("operator by operator" in note for note in row.get("notes", ())) else ""


def _title(result: dict[str, Any]) -> str:
    settings = result["settings"]
    sizes = [f"batch {settings['batch']}"]
    sizes += [f"{key} {settings[key]}" for key in ("sequence", "resolution") if key in settings]
    host = ", values may wait on the host" if settings.get("offload") else ""
    return f"{settings['model']}, {', '.join(sizes)}, {settings['dtype']}{host}"


def _settings(result: dict[str, Any], jobs: Sequence[int] = ()) -> str:
    """How the rows were taken; of several results with as many jobs at a time as any."""
    settings = result["settings"]
    jobs = jobs or [settings["jobs"]]
    side_by_side = f"{jobs[0]} to {jobs[-1]}" if jobs[1:] else str(jobs[0])
    caches = ", which share their caches" if settings.get("shared_caches") else ""
    return (
        f"{result['machine']}, torch {result['torch']}, `{result['allocator']}`, median of {settings['repeats']} "
        f"steps, {side_by_side} rows compiled at a time{caches}"
    )
