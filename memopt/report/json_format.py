"""The JSON form of a report: the records' own fields beside tables of graphs, under a schema name and version.

docs/report_schema.md describes it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from memopt.graph.record import GraphRecord
from memopt.report.record import Report
from memopt.report.tables import TableReader, TableWriter

T = TypeVar("T")

SCHEMA = "memopt-report"
VERSION = 4


def to_json(report: Report) -> str:
    """Strict JSON; infinite and undefined numbers are written as the strings "inf", "-inf" and "nan"."""
    return dumps(document_of(report, SCHEMA, VERSION))


def from_json(text: str) -> Report:
    """Read `to_json`'s text back.

    Raises:
        ValueError: not JSON, not a report, a version that is not known, or a field missing or of the wrong type.
    """
    return record_of(parsed(text), Report, SCHEMA, VERSION)


def document_of(record: Any, schema: str, version: int) -> dict[str, Any]:
    """A record as JSON's own types, its graphs in tables."""
    tables = TableWriter()
    body = _encode(record, tables)
    return {"schema": schema, "version": version, "report": body, **tables.tables()}


def dumps(document: dict[str, Any]) -> str:
    """The document as text: one line for each field of the report, and for each row of a table."""
    lines = []
    for name, value in document.items():
        if isinstance(value, dict):
            inner = ",\n".join(f" {json.dumps(key)}: {_compact(item)}" for key, item in value.items())
            lines.append(f"{json.dumps(name)}: {{\n{inner}\n}}")
        elif isinstance(value, list):
            inner = ",\n".join(f" {_compact(item)}" for item in value)
            lines.append(f"{json.dumps(name)}: [\n{inner}\n]")
        else:
            lines.append(f"{json.dumps(name)}: {_compact(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def parsed(text: str) -> dict[str, Any]:
    """The text as a document that names its schema.

    Raises:
        ValueError: it is none.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not a memopt report: not JSON ({error})") from error
    if not isinstance(document, dict) or not isinstance(document.get("schema"), str):
        raise ValueError(f'not a memopt report: no "schema": "{SCHEMA}"')
    return document


def record_of(document: dict[str, Any], kind: type[T], schema: str, version: int) -> T:
    """The record in a document.

    Raises:
        ValueError: another schema, a version that is not known, or a field missing or of the wrong type.
    """
    if document["schema"] == "memopt-conversion" != schema:
        raise ValueError("the record of a conversion: read it with memopt.convert.record.load")
    if document["schema"] != schema:
        raise ValueError(f'not a memopt report: no "schema": "{schema}"')
    found = document.get("version")
    if found != version:
        newer = isinstance(found, int) and found > version
        why = "written by a newer memopt" if newer else "no longer read"
        raise ValueError(f"a memopt report of version {found}, {why}; this memopt reads version {version}")
    return typing.cast(T, _decode(kind, document.get("report"), "report", TableReader(document)))


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _encode(value: Any, tables: TableWriter) -> Any:
    if isinstance(value, GraphRecord):
        return tables.add(value)
    if dataclasses.is_dataclass(value):
        return {field.name: _encode(getattr(value, field.name), tables) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _encode(item, tables) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(item, tables) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _decode(kind: Any, value: Any, where: str, tables: TableReader) -> Any:
    """Rebuild a value of the annotated type `kind`, or raise ValueError that names the field."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is GraphRecord and type(value) is int and 0 <= value < len(tables.graphs):
        return tables.graphs[value]
    if dataclasses.is_dataclass(kind) and isinstance(kind, type) and kind is not GraphRecord:
        return _decode_record(kind, value, where, tables)
    if origin is tuple and isinstance(value, list):
        return tuple(_decode(arguments[0], item, f"{where}[{index}]", tables) for index, item in enumerate(value))
    if origin in (dict, Mapping) and isinstance(value, dict):
        return {key: _decode(arguments[1], item, f"{where}.{key}", tables) for key, item in value.items()}
    if origin in (typing.Union, types.UnionType):
        return _decode_union(arguments, value, where, tables)
    if origin is typing.Literal and value in arguments:
        return value
    if kind is float and value in ("inf", "-inf", "nan"):
        return float(value)
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if kind in (int, str, bool) and type(value) is kind:
        return value
    raise ValueError(f"not a memopt report: {where} is {value!r:.80}")


def _decode_union(kinds: tuple[Any, ...], value: Any, where: str, tables: TableReader) -> Any:
    if value is None and type(None) in kinds:
        return None
    known = [kind for kind in kinds if kind is not type(None)]
    if len(known) > 1:  # plain types only: a size or the name of one
        known = [kind for kind in known if type(value) is kind] or known
    return _decode(known[0], value, where, tables)


def _decode_record(kind: type, value: Any, where: str, tables: TableReader) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"not a memopt report: {where} is {value!r:.80}")
    hints = typing.get_type_hints(kind)
    # A field that came later has its default in a report that was written before.
    came_later = {field.name for field in dataclasses.fields(kind) if field.metadata.get("later")}
    names = [field.name for field in dataclasses.fields(kind) if field.name in value or field.name not in came_later]
    if set(value) != set(names):
        odd = ", ".join(sorted(set(value) ^ set(names)))
        raise ValueError(f"not a memopt report: fields of {where} differ ({odd})")
    return kind(**{name: _decode(hints[name], value[name], f"{where}.{name}", tables) for name in names})
