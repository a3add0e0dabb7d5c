"""Tables of random modules and of model classes: what came of each on an engine."""

from __future__ import annotations

from typing import Any


def classes_table(result: dict[str, Any]) -> str:
    """One line a class: training within the share of its own peak, and inference."""
    rows = result["rows"]
    counts = {
        mode: ", ".join(
            f"{sum(row[mode] == kind for row in rows)} {kind}" for kind in ("ok", "refused", "failed")
        )
        for mode in ("training", "inference")
    }  # fmt: skip
    lines = [
        f"{len(rows)} classes on the engine `{result['engine']}`, three steps of AdamW within {result['share']:.0%} of "
        "the step's own unconstrained peak (or the least that a refusal named) and inference, beside eager: training "
        f"{counts['training']}; inference {counts['inference']}. {result['machine']}, torch {result['torch']}, "
        f"transformers {result['transformers']}, small configs with random weights.",
        "",
        "| | class | training | budget | held | inference |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        sizes = ["", ""]
        if row.get("measured_bytes"):
            share = row["budget_bytes"] / row["unconstrained_bytes"]
            sizes = [f"{row['budget_bytes'] / 1e3:,.0f} kB ({share:.0%})", f"{row['measured_bytes'] / 1e3:,.0f} kB"]
        cells = [_outcome(row, "training"), *sizes, _outcome(row, "inference")]
        lines.append(f"| {row['kind']} | {row['model']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _outcome(row: dict[str, Any], mode: str) -> str:
    why = row[f"{mode}_why"].replace("|", "/").replace("\n", " ")[:240]
    return f"{row[mode]}: {why}" if why else row[mode]


def modules_table(result: dict[str, Any]) -> str:
    """The counts of a run of random modules."""
    counts = result["counts"]
    lines = [
        f"Programs of seeds {result['seed']:,} to {result['seed'] + result['asked'] - 1:,}, torch {result['torch']}, "
        f"{result['machine']}:",
        "",
        f"| engine | programs | {' | '.join(counts)} |",
        "|---" * (2 + len(counts)) + "|",
        f"| `{result['engine']}` | {result['programs']:,} | {' | '.join(f'{n:,}' for n in counts.values())} |",
    ]
    return "\n".join(lines) + "\n"
