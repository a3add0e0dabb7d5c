"""A report as bytes for a cache, and back: of what is read, nothing but a report's own records is ever made."""

from __future__ import annotations

import io
import pickle
import zlib
from typing import Any

from memopt.difference.graph_diff import GraphNode
from memopt.evidence import Evidence
from memopt.graph.record import GraphRecord, NodeRecord, StorageRecord
from memopt.memory.breakdown import MemoryBreakdown, TensorAtPeak
from memopt.pass_manager import Change, PassRecord, Refusal
from memopt.report.record import (
    ArenaBlock,
    ArenaReport,
    Environment,
    ExecutableReport,
    ProgramReport,
    Report,
    TensorRow,
)
from memopt.step.curve import CurvePoint

_RECORDS = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        ArenaBlock, ArenaReport, Change, CurvePoint, Environment, Evidence, ExecutableReport, GraphNode, GraphRecord,
        MemoryBreakdown, NodeRecord, PassRecord, ProgramReport, Refusal, Report, StorageRecord, TensorAtPeak, TensorRow,
    )
}  # fmt: skip


def packed(report: Report) -> bytes:
    """The report, compressed."""
    return zlib.compress(pickle.dumps(report, protocol=5), level=1)


def unpacked(data: bytes) -> Report:
    """What `packed` was given.

    Raises:
        ValueError: the bytes are no report, or hold anything that is no part of one.
    """
    try:
        report = _Reader(io.BytesIO(zlib.decompress(data))).load()
    except Exception as error:  # damaged bytes may raise anything
        raise ValueError(f"no report: {type(error).__name__}: {error}") from error
    if not isinstance(report, Report):
        raise ValueError(f"no report, but {type(report).__name__}")
    return report


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Records of a report by name; whatever else is asked for is refused."""
        return _RECORDS[module, name]
