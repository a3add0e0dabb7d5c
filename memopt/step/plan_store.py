"""Plans kept on disk: a step that was planned once is planned again without a search, in any later process.

What is read is a proposal, never an answer: the schedule is judged by the independent checker on the real problem, and
the peak is counted anew on the finished programs. What does not pass counts as absent.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from memopt.memory.cost.disk import Record
from memopt.pass_manager import Pass
from memopt.solve.schedule import Schedule
from memopt.step.compile_cache import CompileCache
from memopt.step.curve import CurvePoint
from memopt.step.keys import described
from memopt.step.planned import Planned, fingerprint

# A schedule has no more steps than this: a longer one is none of ours.
_LONGEST = 1 << 22


@dataclasses.dataclass(frozen=True)
class StoredPlan:
    """What a search has chosen.

    Attributes:
        lowering: names of the rewrites that reduce the minimum, those that are used, in order.
        schedules: per graph.
        peaks: per graph, the peak in bytes of the schedule by itself, as `memopt.solve.check` counts it.
        peak_bytes: the finished step's peak above what is resident.
        minimum_bytes: the least such peak that was found.
        curve: what more or less memory would cost.
    """

    lowering: tuple[str, ...]
    schedules: tuple[Schedule, ...]
    peaks: tuple[int, ...]
    peak_bytes: int
    minimum_bytes: int
    curve: tuple[CurvePoint, ...]


class PlanStore(CompileCache[StoredPlan]):
    """Plans of steps."""

    kind = "plans"

    @staticmethod
    def encoded(entry: StoredPlan) -> dict[str, Any]:
        """The plan in what JSON can hold."""
        return {
            "lowering": list(entry.lowering),
            "schedules": [_packed(schedule) for schedule in entry.schedules],
            "peaks": list(entry.peaks),
            "peak_bytes": entry.peak_bytes,
            "minimum_bytes": entry.minimum_bytes,
            "curve": [[point.bytes, point.seconds, point.extra, point.chosen] for point in entry.curve],
        }

    @staticmethod
    def decoded(record: Record) -> StoredPlan:
        """The plan of a record; errors as `CompileCache` says."""
        schedules = tuple(_unpacked(packed) for packed in record["schedules"])
        curve = tuple(CurvePoint(_size(a), _time(b), _time(c), bool(d)) for a, b, c, d in record["curve"])
        lowering = tuple(record["lowering"])
        peaks = tuple(_size(peak) for peak in record["peaks"])
        if not all(isinstance(name, str) for name in lowering) or len(peaks) != len(schedules):
            raise ValueError("not a plan")
        return StoredPlan(
            lowering, schedules, peaks, _size(record["peak_bytes"]), _size(record["minimum_bytes"]), curve
        )


def key_of(graphs: Sequence[Planned], passes: Sequence[Pass], limit: int | None, seconds: float) -> str:
    """What a plan depends on: graphs, the costs of their operators, passes, the limit, and time for the search.

    Devices are in it as the graphs' own and by the costs that were measured on them.

    Args:
        graphs: the step's graphs before the plan.
        passes: all training passes in order.
        limit: bytes above what is resident; None without a limit.
        seconds: time for one search.
    """
    digest = hashlib.sha256()
    for graph in graphs:
        digest.update(fingerprint(graph.before).encode())
        for name, cost in sorted(graph.costs.items()):
            digest.update(f"{name} {cost.seconds!r} {cost.workspace_bytes}\n".encode())
    facts = {"graphs": digest.hexdigest(), "passes": described(passes), "limit": limit, "seconds": seconds}
    return json.dumps(facts)


def _packed(schedule: Schedule) -> Mapping[str, Any]:
    # Neighbouring steps are mostly neighbouring operations: their differences compress well.
    differences = np.diff(np.array(schedule.steps, dtype="<i4"), prepend=np.int32(0))
    return {"forward": schedule.forward, "steps": base64.b64encode(zlib.compress(differences.tobytes())).decode()}


def _unpacked(packed: Any) -> Schedule:
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(base64.b64decode(packed["steps"], validate=True), 4 * _LONGEST)
    if not unpacker.eof:
        raise ValueError("a schedule is cut off, or longer than any")
    steps = np.cumsum(np.frombuffer(data, dtype="<i4"), dtype=np.int64)
    return Schedule(tuple(steps.tolist()), _size(packed["forward"]))


def _size(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("not a number of bytes or steps")
    return value


def _time(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
        raise ValueError("not a time")
    return float(value)
