"""Automatic checkpoint insertion: keep or recompute each tensor that backward needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from memopt.memory.timeline import timeline
from memopt.pass_manager import Change, Pass, PassResult, Refusal
from memopt.program import Phase, Program, is_random, source_line
from memopt.solve.schedule import Schedule
from memopt.step.encode_step import Cost, followed
from memopt.step.planner import plan_step


class Checkpoint(Pass):
    """Rewrites the backward graph of a training program so that less has to be kept for it.

    Algebra: a value that backward needs may be recomputed from values that are still there, by the same operator
    on the same operands, with bitwise the same result.

    1. A forward operation that a schedule runs again becomes a node `x_again` of the backward graph.
    2. A view is never kept: it is rebuilt from the tensor that owns its storage.
    3. Batch norm in training runs again without its running statistics, which move once only.

    Refused: random operations (their outputs are kept: a recomputed mask would have to be the same one), operations
    with effects, and operations that read an input that the program mutates. An inference program is returned as it is.
    """

    name: ClassVar[str] = "checkpoint"
    tolerance: ClassVar[float] = 0.0

    def __init__(
        self,
        limit_bytes: int | None = None,
        *,
        costs: Mapping[str, Cost] | None = None,
        schedule: Schedule | None = None,
        seconds: float = 20.0,
    ) -> None:
        """Set the limit.

        Args:
            limit_bytes: the most bytes above what is resident; None: recompute only what costs no time.
            costs: seconds and workspace bytes by node name.
            schedule: a schedule found before, for this very program: nothing is searched.
            seconds: time for the search.
        """
        self.limit_bytes, self.costs, self.schedule, self.seconds = limit_bytes, costs or {}, schedule, seconds

    def run(self, program: Program) -> PassResult:
        """Plan and rewrite.

        Raises:
            ValueError: no schedule keeps the limit; the message gives the least peak found.
        """
        if not program.training:
            return PassResult(program)
        if self.schedule is not None:
            planned = followed(program, self.costs, self.schedule)
        else:
            step = plan_step(
                [program],
                [self.costs],
                self.limit_bytes,
                lambda candidate: (candidate, timeline(candidate, workspace(candidate, self.costs))),
                seconds=self.seconds,
            )
            if not step.feasible:
                raise ValueError(
                    f"no plan stays below {self.limit_bytes} bytes; the least peak is {step.minimum_bytes}"
                )
            planned = step.choices[0].program
        changes = tuple(
            Change(f"recompute {node.meta['recomputes']} in backward", (node.meta["recomputes"],), (node.name,))
            for node in planned.calls
            if "recomputes" in node.meta and not node.name.startswith("getitem")
        )
        refusals = tuple(
            Refusal(node.name, f"draws random numbers: its result is kept ({source_line(node) or 'source unknown'})")
            for node in program.calls
            if is_random(node) and node.meta["phase"] is Phase.FORWARD
        )
        if not changes and _same_order(program, planned):
            return PassResult(program, (), refusals)
        return PassResult(planned, changes or (Change("rebuild views in backward instead of keeping them"),), refusals)


def workspace(program: Program, costs: Mapping[str, Cost]) -> dict[str, int]:
    """Workspace bytes by node name; a recomputed node takes what its original takes."""
    found = {}
    for node in program.calls:
        cost = costs.get(node.name) or costs.get(node.meta.get("recomputes", ""))
        if cost is not None:
            found[node.name] = cost.workspace_bytes
    return found


def _same_order(before: Program, after: Program) -> bool:
    return [node.name for node in before.graph.nodes] == [node.name for node in after.graph.nodes]
