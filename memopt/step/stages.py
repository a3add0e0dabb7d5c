"""Training passes by their place around the plan, and a plan applied to a program again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

from memopt.memory.cost.table import OperatorCost
from memopt.pass_manager import Pass, PassManager
from memopt.passes.channels_last import ChannelsLast, Judge
from memopt.passes.checkpoint import Checkpoint
from memopt.program import Program
from memopt.solve.schedule import Schedule
from memopt.step.pass_memo import PassMemo


@dataclasses.dataclass(frozen=True)
class Stages:
    """Training passes by their place around the plan.

    Attributes:
        early: before the plan, always.
        lowering: before the plan, where they pay: they reduce the minimum that a step can be planned for.
        late: after the plan.
        searched: whether there is a plan: whether `checkpoint` is among the passes.
        fusion: what the engine does not store; None where it stores every value.
        arranges: whether graphs are put in the order that suits the engine.
    """

    early: tuple[Pass, ...]
    lowering: tuple[Pass, ...]
    late: tuple[Pass, ...]
    searched: bool
    fusion: Fusion | None = None
    arranges: bool = False

    def called(self, keys: Sequence[str]) -> tuple[Pass, ...] | None:
        """The rewrites of `lowering` with these keys, or what may take their place; None where there are no such."""
        every = (other for item in self.lowering for other in (item, *item.others, *filter(None, [item.deeper])))
        found = tuple(item for item in every if item.key in keys)
        return found if tuple(item.key for item in found) == tuple(keys) else None

    def arranged(self, program: Program) -> Program:
        """The program after the early rewrites, in the order of operations that suits the engine."""
        return self.fusion.arrange(program) if self.fusion is not None and self.arranges else program

    def marked(self, program: Program) -> Program:
        """The program, rewritten as far as the plan, with marks on what the engine does not store."""
        return program if self.fusion is None else self.fusion.mark(program)

    def lays_out(self, program: Program, kept: PassMemo) -> bool:
        """Whether a captured program is laid out channels last, where that is the first thing done with it."""
        first = [item for item in self.early[:1] if isinstance(item, ChannelsLast)]
        return any(item.run(program).changes for item in kept.of(first))


class Fusion(Protocol):
    """What an engine's kernels fuse away, and what is left of the costs."""

    def arrange(self, program: Program) -> Program:
        """Return the program in an order in which kernels fuse well, each operation after what it reads."""

    def mark(self, program: Program) -> Program:
        """Return the program with `meta["fused"]` on the values that are never stored."""

    def costs(self, program: Program, costs: Mapping[str, OperatorCost]) -> Mapping[str, OperatorCost]:
        """Costs by node name of a marked program, from those of its operators one by one."""


def judged(passes: Sequence[Pass], judge: Judge) -> tuple[Pass, ...]:
    """The passes, with a judge that decides between layouts."""
    return tuple(item.judged_by(judge) if isinstance(item, ChannelsLast) else item for item in passes)


def stages_of(passes: Sequence[Pass], fusion: Fusion | None = None) -> Stages:
    """Sort training passes into stages; without `checkpoint` all are early."""
    place = next((index for index, item in enumerate(passes) if isinstance(item, Checkpoint)), None)
    if place is None:
        return Stages(tuple(passes), (), (), False, fusion)
    return Stages(
        early=tuple(item for item in passes[:place] if not item.lowers_floor),
        lowering=tuple(item for item in passes[:place] if item.lowers_floor),
        late=tuple(item for item in passes[place + 1 :] if not isinstance(item, Checkpoint)),
        searched=True,
        fusion=fusion,
    )


def replay(program: Program, stages: Stages, lowering: Sequence[Pass], schedule: Schedule | None) -> Program:
    """Apply a plan that was found for an equal program; without a schedule nothing is recomputed."""
    planned = [] if schedule is None else [Checkpoint(schedule=schedule)]
    early, _ = PassManager(stages.early, False).run(program)
    before, _ = PassManager(lowering, False).run(stages.arranged(early))
    result, _ = PassManager([*planned, *stages.late], False).run(stages.marked(before))
    return result
