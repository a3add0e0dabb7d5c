"""What every model took at each share of its plain peak, as tables of models by shares."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Row = dict[str, Any]


def budgets_table(result: dict[str, Any]) -> str:
    """For each engine: how much of each budget a step took, and its time; refused budgets are left empty."""
    plural = "" if result["threads"] == 1 else "s"
    lines = [
        f"{result['machine']}, {result['threads']} thread{plural}, torch {result['torch']}, batch "
        f"{result['settings']['batch']}; fastest of {result['settings']['repeats']} steps:"
    ]
    for backend in dict.fromkeys(row["backend"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["backend"] == backend]
        peers = {row["model"]: row for row in rows if "budget_bytes" not in row}
        lines += ["", f"`{backend}`: {_summary(rows, peers)}", ""]
        shares = sorted((name for name in {row["row"] for row in rows} if name.endswith("%")), reverse=True)
        lines.append(f"| | peak without | {' | '.join(shares)} | least |")
        lines.append("|---" * (len(shares) + 3) + "|")
        for model, peer in peers.items():
            found = {row["row"]: row for row in rows if row["model"] == model}
            plain = f"{peer['peak_bytes'] / 1e3:,.0f} kB" if "peak_bytes" in peer else peer["error"]
            cells = [_cell(found.get(share), peer) for share in shares]
            lines.append(f"| {model} | {plain} | {' | '.join(cells)} | {_least(found.get('least'), peer)} |")
    return "\n".join(lines) + "\n"


def _summary(rows: list[Row], peers: dict[str, Row]) -> str:
    kept = [row for row in rows if "predicted_bytes" in row]
    inside = sum(row["peak_bytes"] <= row["budget_bytes"] for row in kept)
    errors = [row["predicted_bytes"] / row["peak_bytes"] - 1 for row in kept] or [0.0]
    worst = [row["gradient_error"] / peers[row["model"]]["gradient_error"] for row in kept]
    names = ", ".join(dict.fromkeys(row["row"] for row in peers.values() if "error" not in row))
    far = sum(abs(error) > 0.03 for error in errors)
    return (
        f"{inside} of {len(kept)} steps stayed within their budget; the predicted peak is off by {min(errors):+.2%} to "
        f"{max(errors):+.2%}, in {far} of them by more than 3 %, and the gradients' error against float64 is at most "
        f"{max(worst, default=0):.2f} times that of `{names}`."
    )


def _cell(row: Row | None, peer: Row) -> str:
    if row is None or "seconds" not in row:
        return ""
    return ", ".join(_figures(row, peer))


def _figures(row: Row, peer: Row) -> Iterator[str]:
    yield f"{row['peak_bytes'] / row['budget_bytes']:.1%}"
    mark = "¹" if any("operator by operator" in note for note in row["notes"]) else ""
    time = f"{row['seconds'] / peer['seconds']:.2f}{mark}"
    yield f"{time} ({1 + row['predicted_extra']:.2f})" if "predicted_extra" in row else time


def _least(row: Row | None, peer: Row) -> str:
    if row is None:
        return ""
    if "seconds" not in row:
        return f"{row['minimum_bytes'] / 1e3:,.0f} kB, refused again"
    return f"{row['budget_bytes'] / 1e3:,.0f} kB: {_cell(row, peer)}"
