"""The JSON form of a report: the records' own fields, under a schema name and version."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from typing import Any

from memopt.report.record import Report

SCHEMA = "memopt-report"
VERSION = 2


def to_json(report: Report) -> str:
    """Strict JSON; infinite and undefined numbers are written as the strings "inf", "-inf" and "nan"."""
    document = {"schema": SCHEMA, "version": VERSION, "report": _encode(report)}
    return json.dumps(document, indent=1, allow_nan=False)


def from_json(text: str) -> Report:
    """Read `to_json`'s text back.

    Raises:
        ValueError: not JSON, not a report, a version that is not known, or a field missing or of the wrong type.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not a memopt report: not JSON ({error})") from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ValueError(f'not a memopt report: no "schema": "{SCHEMA}"')
    if document.get("version") != VERSION:
        raise ValueError(f"a memopt report of version {document.get('version')}; this memopt reads version {VERSION}")
    return typing.cast(Report, _decode(Report, document.get("report"), "report"))


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _decode(kind: Any, value: Any, where: str) -> Any:
    """Rebuild a value of the annotated type `kind`, or raise ValueError that names the field."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _decode_record(kind, value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(_decode(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (kind,) = [item for item in arguments if item is not type(None)]
        return _decode(kind, value, where)
    if origin is typing.Literal and value in arguments:
        return value
    if kind is float and value in ("inf", "-inf", "nan"):
        return float(value)
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if kind in (int, str, bool) and type(value) is kind:
        return value
    raise ValueError(f"not a memopt report: {where} is {value!r}")


def _decode_record(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"not a memopt report: {where} is {value!r}")
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    if set(value) != set(names):
        odd = ", ".join(sorted(set(value) ^ set(names)))
        raise ValueError(f"not a memopt report: fields of {where} differ ({odd})")
    return kind(**{name: _decode(hints[name], value[name], f"{where}.{name}") for name in names})
