"""Comparisons as tables of models by engines; what did not run is said below."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

Row = dict[str, Any]

_UNSTEADY = 0.1  # of the median: a wider spread is marked


def compare_table(result: dict[str, Any]) -> str:
    """Time of a step, memory, error, and time of the first step, each a table of models by engines; what has no row."""
    reasons = _reasons(result["comparisons"])
    return "\n".join([*_tables(result, 4), *reasons]).rstrip() + "\n"


def brief_compare_table(result: dict[str, Any]) -> str:
    """Time of a step and memory alone."""
    return "\n".join(_tables(result, 2)).rstrip() + "\n"


def _tables(result: dict[str, Any], count: int) -> list[str]:
    comparisons = result["comparisons"]
    names = list(dict.fromkeys(row["name"] for item in comparisons for row in item["rows"]))
    engines = [name for name in names if any(row["seconds"] for item in comparisons for row in _named(item, name))]
    first = comparisons[0]
    training = first["mode"] == "training"
    driver = f", driver {first['versions']['driver']}" if "driver" in first["versions"] else ""
    beside = [key for key in ("onnxruntime-gpu", "onnxruntime", "jax") if key in first["versions"]]
    libraries = "".join(f", {key} {first['versions'][key]}" for key in beside)
    tables: list[tuple[str, Callable[[Row], str]]] = [
        (
            f"{first['mode'].capitalize()}, {first['dtype']}; {first['device']}{driver}, torch "
            f"{first['versions']['torch']}{libraries}; median of {first['settings']['repeats']} steps ± half the "
            "distance of the quartiles, in milliseconds; ~ unsteady, ! numbers that differ, - no row:",
            _milliseconds,
        )
    ]
    if training:
        words = "Allocated at most (reserved), of the budget where there is one, in MB; `process`: all that it holds of"
        tables.append((f"{words} the device:", _kept))
        tables.append(("Error of the gradients against float64, relative, in the Euclidean norm:", _gradients))
    else:
        words = "What the process holds of the device, libraries included and, in parentheses, what PyTorch's allocator"
        tables.append((f"{words} gave out at most, in MB:", _megabytes))
        tables.append(("Error of the results against float64, relative, in the Euclidean norm:", _error))
    tables.append(("The first step, in seconds, from nothing and beside other compilers:", _first))
    lines = [result["note"], ""] if "note" in result else []
    for words, cell in tables[:count]:
        lines += [words, "", *_matrix(comparisons, engines, cell), ""]
    return lines


def _reasons(comparisons: list[dict[str, Any]]) -> Iterator[str]:
    reasons: dict[tuple[str, str], list[str]] = {}
    for item in comparisons:
        for row in item["rows"]:
            if row["reason"]:
                reasons.setdefault((row["name"], row["reason"]), []).append(item["model"])
    for (name, reason), models in reasons.items():
        where = "" if len(models) == len(comparisons) else f" ({', '.join(models)})"
        yield from (f"`{name}`{where}: {reason}", "")


def _named(item: dict[str, Any], name: str) -> list[Row]:
    return [row for row in item["rows"] if row["name"] == name]


def _matrix(comparisons: list[dict[str, Any]], engines: list[str], cell: Callable[[Row], str]) -> Iterator[str]:
    yield f"| model | {' | '.join(engines)} |"
    yield "|---" * (len(engines) + 1) + "|"
    for item in comparisons:
        settings = item["settings"]
        sizes = ", ".join(str(settings[key]) for key in ("batch", "sequence", "resolution") if key in settings)
        rows = [next(iter(_named(item, name)), None) for name in engines]
        cells = [cell(row) if row is not None and row["seconds"] else "-" for row in rows]
        yield f"| {item['model']} {sizes} | {' | '.join(cells)} |"


def _milliseconds(row: Row) -> str:
    low, _, high = statistics.quantiles(row["seconds"], n=4, method="inclusive")
    median, half = statistics.median(row["seconds"]), (high - low) / 2
    marks = (" ~" if half > _UNSTEADY * median else "") + (" !" if row["differs"] else "")
    return f"{median * 1e3:.2f} ±{half * 1e3:.2f}{marks}"


def _kept(row: Row) -> str:
    allocated, reserved, budget = (_size(row[key]) for key in ("allocated_bytes", "reserved_bytes", "budget_bytes"))
    if not allocated:
        held = _size(row.get("process_bytes"))
        allocated = f"process {held}" if held else "?"
    return f"{allocated}{f' ({reserved})' if reserved else ''}{f' of {budget}' if budget else ''}"


def _megabytes(row: Row) -> str:
    held, given = _size(row["process_bytes"]), _size(row["allocated_bytes"])
    return f"{held or '?'}{f' ({given})' if given else ''}"


def _size(value: int | None) -> str:
    return "" if value is None else f"{value / 1e6:,.0f}"


def _error(row: Row) -> str:
    return "" if row["error"] is None else f"{float(row['error']):.1e}"


def _gradients(row: Row) -> str:
    return "" if row["gradient_error"] is None else f"{float(row['gradient_error']):.1e}"


def _first(row: Row) -> str:
    return f"{row['first_seconds']:,.1f}"
