"""Plans transferred from one size of a step to another: the same operations on tensors of other sizes.

A schedule is an order of operations by number. Where another program has the same operations under the same names, the
order is one of that program's too, if the checker accepts it there: only bytes and seconds have to be counted anew.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from memopt.program import Program
from memopt.solve.check import check
from memopt.solve.recompute import Curve, Plan, evenly
from memopt.solve.schedule import Schedule, ScheduleError, simulate
from memopt.step.encode_step import Lowering
from memopt.step.planner import Choice

# Of a searched curve so many schedules are carried at most.
_CARRIED = 32
# For so many sizes of one model a plan is searched for.
SEARCHES = 8

_STRUCTURES: WeakKeyDictionary[Program, str] = WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class TransferredPlan:
    """The trade-off that was found for a step of one size.

    Attributes:
        lowering: names of the rewrites that reduce the minimum, those that are used.
        operations: per graph, the names of its operations.
        schedules: per graph, orders of them, fastest first.
        plain_bytes: the step's peak without a plan.
    """

    lowering: tuple[str, ...]
    operations: tuple[tuple[str, ...], ...]
    schedules: tuple[tuple[Schedule, ...], ...]
    plain_bytes: int


class Sizes:
    """The plans of one model's steps, the largest of each structure: smaller steps are served without a search."""

    def __init__(self) -> None:
        """Nothing is planned yet."""
        self._largest: dict[tuple[str, ...], TransferredPlan] = {}
        self._searches = 0

    @property
    def exhausted(self) -> bool:
        """Whether so many sizes were searched for that no more are."""
        return self._searches >= SEARCHES

    def serves(self, programs: Sequence[Program], plain_bytes: int) -> bool:
        """Whether a plan of a step as large or larger is known."""
        known = self._largest.get(tuple(map(structure, programs)))
        return known is not None and plain_bytes <= known.plain_bytes

    def proposal(self, programs: Sequence[Program], plain_bytes: int) -> TransferredPlan | None:
        """A plan to carry over to a step that peaks at `plain_bytes` without one; None where it is worth a search."""
        if self.serves(programs, plain_bytes) or self.exhausted:
            return self._largest.get(tuple(map(structure, programs)))
        return None

    def keep(self, programs: Sequence[Program], plan: TransferredPlan, *, searched: bool) -> None:
        """Keep a step's plan if the step is the largest of its structure; count what was searched for."""
        self._searches += searched
        key = tuple(map(structure, programs))
        if key not in self._largest or plan.plain_bytes > self._largest[key].plain_bytes:
            self._largest[key] = plan


def structure(program: Program) -> str:
    """A digest of the graph that leaves sizes out: names, operators, and which value each one reads."""
    if program not in _STRUCTURES:
        digest = hashlib.sha256()
        for node in program.graph.nodes:
            reads = [argument.name for argument in node.all_input_nodes]
            digest.update(f"{node.name}|{node.target}|{reads}\n".encode())
        _STRUCTURES[program] = digest.hexdigest()
    return _STRUCTURES[program]


def carried_from(lowering: Sequence[str], choices: Sequence[Choice], plain_bytes: int) -> TransferredPlan:
    """What of a step's plans can be transferred.

    Args:
        lowering: names of the rewrites that reduce the minimum, those that are used.
        choices: the plan of each graph.
        plain_bytes: the step's peak without a plan.
    """
    return TransferredPlan(
        tuple(lowering),
        tuple(names_of(choice.lowering) for choice in choices),
        tuple(spread([point.schedule for point in choice.curve.points]) for choice in choices),
        plain_bytes,
    )


def names_of(lowering: Lowering) -> tuple[str, ...]:
    """The names of a lowered program's operations, in order."""
    return tuple(node.name for node in lowering.operations)


def spread(schedules: Sequence[Schedule]) -> tuple[Schedule, ...]:
    """At most a few of the schedules, evenly, the first and the last among them."""
    return evenly(schedules, _CARRIED)


def carried_curve(lowering: Lowering, names: Sequence[str], schedules: Sequence[Schedule]) -> Curve:
    """What schedules found at another size take at this one, that of recomputing nothing among them.

    Args:
        lowering: the program at this size.
        names: of the operations at the other size.
        schedules: orders of them.

    Raises:
        ScheduleError: the operations are others, or the checker does not accept a schedule here.
    """
    if names_of(lowering) != tuple(names):
        raise ScheduleError("the operations are others at this size")
    problem = lowering.problem
    plain = Schedule(tuple(range(len(names))), problem.forward)
    plans = []
    for schedule in dict.fromkeys((plain, *schedules)):
        if not set(schedule.steps) <= set(range(len(names))):
            raise ScheduleError("a schedule names operations that there are none of")
        trace = simulate(problem, schedule)
        check(problem, schedule, trace.peak_bytes)
        plans.append((trace.seconds, trace.peak_bytes, schedule))
    points: list[Plan] = []
    least = min(peak for _, peak, _ in plans)
    for seconds, peak, schedule in sorted(plans, key=lambda plan: plan[:2]):
        if not points or peak < points[-1].peak_bytes:
            points.append(Plan(schedule, peak, seconds, seconds - problem.base_seconds, least, True))
    return Curve(tuple(points))
