"""A comparison as a table of text."""

from __future__ import annotations

from collections.abc import Sequence

from memopt.budget import format_bytes
from memopt.comparison.record import Comparison, Row
from memopt.memory.breakdown import align
from memopt.report.curve_table import format_seconds


def to_text(comparison: Comparison) -> str:
    """A title, one line per row, and the notes; it ends with a newline."""
    lines = [title(comparison), ""]
    cells = [[name for name, _ in COLUMNS], *(row_cells(row) for row in comparison.rows)]
    kept = filled_columns(comparison.rows)
    table = align([[line[index] for index in kept] for line in cells])
    width = max((len(row.name) for row in comparison.rows), default=0)
    lines.append(table[0])
    for row, line in zip(comparison.rows, table[1:], strict=True):
        lines.append(f"{row.name:<{width}}  {row.reason}" if row.reason else line)
    notes = [f"{row.name}: {note}" for row in comparison.rows for note in row.notes]
    wrong = [row.name for row in comparison.rows if row.differs]
    if wrong:
        notes.append(f"THE NUMBERS DIFFER by more than rounding explains: {', '.join(wrong)}")
    lines += [""] * bool(notes or comparison.notes) + [f"note: {note}" for note in (*comparison.notes, *notes)]
    return "\n".join(lines) + "\n"


def title(comparison: Comparison) -> str:
    """One line: the model, the step, what it ran on, and how it was timed."""
    settings = comparison.settings
    parts = [comparison.model, comparison.mode, *(f"{key} {settings[key]}" for key in ("batch",) if key in settings)]
    parts += [f"optimizer {settings['optimizer']}"] if settings.get("optimizer") else []
    parts += [comparison.dtype] if comparison.dtype != "as given" else []
    threads = "" if comparison.settings.get("allocator") else f", {settings['threads']} threads"
    return (
        f"{', '.join(parts)}; {comparison.device}, torch {comparison.versions['torch']}{threads}; "
        f"median of {settings['repeats']} steps ± half the distance of the quartiles"
    )


COLUMNS: tuple[tuple[str, str], ...] = (
    ("engine", "the engine, and its budget"),
    ("step", "the median of the timed steps"),
    ("±", "half the distance between their quartiles"),
    ("first step", "with everything that is done once: capture, planning, compilation"),
    ("budget", "what was asked for"),
    ("predicted", "the peak that memopt predicts"),
    ("allocated", "the most that PyTorch's allocator had given out at once, everything resident included"),
    ("reserved", "the most that the caching allocator held"),
    ("process", "what the process held of the device (CUDA), or its resident memory (CPU), libraries included"),
    ("error", "of the results against float64, relative, in the Euclidean norm"),
    ("gradient error", "the same of the parameters' gradients"),
)


def filled_columns(rows: Sequence[Row]) -> list[int]:
    """Places in `COLUMNS` of the first one and of those that some row has a figure for."""
    cells = [row_cells(row) for row in rows]
    return [0, *(index for index in range(1, len(COLUMNS)) if any(line[index] for line in cells))]


def row_cells(row: Row) -> list[str]:
    """The row's figures in words, one per entry of `COLUMNS`; empty where there is none."""
    sizes = (row.budget_bytes, row.predicted_bytes, row.allocated_bytes, row.reserved_bytes, row.process_bytes)
    mark = " !" if row.differs else ""
    return [
        row.name,
        *("" if value is None else format_seconds(value) for value in (row.median, row.spread, row.first_seconds)),
        *("" if value is None else format_bytes(value, short=True) for value in sizes),
        "" if row.error is None else f"{row.error:.1e}{mark}",
        "" if row.gradient_error is None else f"{row.gradient_error:.1e}{mark}",
    ]
