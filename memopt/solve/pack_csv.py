"""Lists of buffers as google/minimalloc writes them: CSV with a header, one buffer to a line, offsets in a last column.

Columns in any order: `id`, `lower`, `upper`, `size` and, where given, `alignment`; further ones are kept as they are.
As there, `buffer` and `buffer_id` mean `id`, `start` and `begin` mean `lower`, and `end` is the last moment of life,
one below `upper`. A life with `gaps` and a buffer with an `offset` of its own are refused.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import re
from collections.abc import Sequence

from memopt.solve.pack_problem import Buffer, refuse_malformed

_SAME = {"buffer": "id", "buffer_id": "id", "start": "lower", "begin": "lower", "end": "upper"}
_NEEDED = ("id", "lower", "upper", "size")
_REFUSED = {
    "gaps": "lives with gaps are not supported",
    "offset": "offsets given beforehand are not supported: remove the column to place the buffers anew",
}
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}", re.ASCII)


class CsvError(ValueError):
    """A file that is no list of buffers; the message names line and column."""


@dataclasses.dataclass(frozen=True)
class Table:
    """A list of buffers as it was read.

    Attributes:
        header: the names of the columns.
        rows: the fields of each line after it.
        ids: of the buffers, in order.
        buffers: what the lines say.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    ids: tuple[str, ...]
    buffers: tuple[Buffer, ...]

    def with_offsets(self, offsets: Sequence[int]) -> str:
        """The same lines with a last column `offset`."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([*self.header, "offset"])
        writer.writerows([*row, offset] for row, offset in zip(self.rows, offsets, strict=True))
        return text.getvalue()


def read_table(text: str) -> Table:
    """Read a list of buffers.

    Raises:
        CsvError: not CSV, a column missing, twice or refused, a line with too few or too many fields, a field that is
            no whole number, or a buffer that makes no sense.
    """
    reader = csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), strict=True)
    header: tuple[str, ...] | None = None
    columns: dict[str, int] = {}
    rows, ids, buffers = [], [], []
    try:
        for row in reader:
            if not row:
                continue
            if header is None:
                header, columns = tuple(row), _columns(row, reader.line_num)
                continue
            if len(row) != len(header):
                raise CsvError(f"line {reader.line_num}: {len(row)} fields, where the header names {len(header)}")
            rows.append(tuple(row))
            ids.append(row[columns["id"]].strip())
            buffers.append(_buffer(row, header, columns, reader.line_num))
    except csv.Error as error:
        raise CsvError(f"line {max(1, reader.line_num)}: {error}") from error
    if header is None:
        raise CsvError("line 1: no header; it must name the columns id, lower, upper and size")
    return Table(header, tuple(rows), tuple(ids), tuple(buffers))


def _columns(header: list[str], line: int) -> dict[str, int]:
    columns: dict[str, int] = {}
    for index, written in enumerate(header):
        name = _SAME.get(written.strip(), written.strip())
        if name in _REFUSED:
            raise CsvError(f"line {line}, column {name}: {_REFUSED[name]}")
        if name in columns:
            raise CsvError(f"line {line}, column {name}: named twice")
        columns[name] = index
    for name in _NEEDED:
        if name not in columns:
            raise CsvError(f"line {line}: no column {name}; the header must name id, lower, upper and size")
    return columns


def _buffer(row: list[str], header: tuple[str, ...], columns: dict[str, int], line: int) -> Buffer:
    numbers = {"alignment": 1}
    for name in ("lower", "upper", "size", "alignment"):
        if name not in columns:
            continue
        written, field = header[columns[name]].strip(), row[columns[name]].strip()
        if not _WHOLE.fullmatch(field):
            raise CsvError(f"line {line}, column {written}: {field[:40]!r} is not a whole number of up to 18 digits")
        numbers[name] = int(field) + (written == "end")
    buffer = Buffer(numbers["lower"], numbers["upper"], numbers["size"], numbers["alignment"])
    try:
        refuse_malformed([buffer])
    except ValueError as error:
        reason = str(error).removeprefix("buffer 0: ")
        written = header[columns[reason.split()[0]]].strip()
        raise CsvError(f"line {line}, column {written}: {reason}") from error
    return buffer
