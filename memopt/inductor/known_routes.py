"""The route of a step, how it was lowered in the end, kept on disk: a later process goes it without further tries.

What is read is a proposal: the code that comes of it is judged as any other, and where it does not keep the budget the
search starts as if nothing had been known.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from memopt.program import Program
from memopt.step.compile_cache import CompileCache
from memopt.step.keys import step_facts

if TYPE_CHECKING:
    from memopt.compilation.session import Session

# A correction is a difference of bytes on one device.
_MOST = 1 << 50


@dataclasses.dataclass(frozen=True)
class Route:
    """What a step was settled with.

    Attributes:
        planned: whether it follows a plan; else torch's own partition.
        lowering: names of the rewrites that torch's partition was made with, to reduce the minimum; a plan has its own.
        correction: bytes that the code needs less than the plan says; of torch's partition, below 0: what it
            saves less.
    """

    planned: bool
    lowering: tuple[str, ...] = ()
    correction: int = 0

    @property
    def described(self) -> str:
        """In words, for a log."""
        if self.planned:
            way = "more" if self.correction > 0 else "less"
            return f"a plan for {abs(self.correction)} bytes {way}" if self.correction else "a plan"
        less = f" that saves {-self.correction} bytes less" if self.correction else ""
        return " and ".join([f"torch's own partition{less}", *([", ".join(self.lowering)] if self.lowering else [])])


class KnownRoutes(CompileCache[Route]):
    """What settled steps."""

    kind = "settled"

    @staticmethod
    def encoded(entry: Route) -> dict[str, Any]:
        """What settled a step, in what JSON can hold."""
        return {**dataclasses.asdict(entry), "lowering": list(entry.lowering)}

    @staticmethod
    def decoded(record: dict[str, Any]) -> Route:
        """What settled a step, of a record.

        Raises:
            ValueError: it is none.
        """
        if set(record) != {"planned", "lowering", "correction"}:
            raise ValueError("other fields")
        planned, lowering, correction = record["planned"], record["lowering"], record["correction"]
        named = isinstance(lowering, list) and all(isinstance(name, str) for name in lowering)
        if type(planned) is not bool or not named or type(correction) is not int or abs(correction) > _MOST:
            raise ValueError("a field is of another kind")
        return Route(planned, tuple(lowering), correction)


def key_of(session: Session, program: Program) -> str:
    """What a settled step depends on: the step itself, its budget, and what is known of the allocator."""
    budget = None if session.budget is None else repr(session.budget)
    return json.dumps({**step_facts(session, program), "budget": budget, "margin": session.margin}, sort_keys=True)
