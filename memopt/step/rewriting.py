"""The passes of one model's training steps: sorted around the plan, with what they made of its graphs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from memopt.compilation.layout import JudgedByCost
from memopt.engine import Engine
from memopt.memory.cost.table import CostTable
from memopt.pass_manager import Pass
from memopt.program import Program
from memopt.step.pass_memo import PassMemo
from memopt.step.stages import Stages, judged, stages_of


class Rewriting:
    """How one model's training steps are rewritten.

    Attributes:
        passes: all of them, in order.
        kept: what they made of the graphs that are lowered now.
        arranges: whether graphs are put in the order that suits the engine; the given one may need less memory.
    """

    def __init__(self, passes: Sequence[Pass] | None, engine: Engine, table: CostTable) -> None:
        """Take the passes, None for `memopt.TRAINING`, and what says which layouts and fusions there are."""
        from memopt.passes import TRAINING

        self.passes: tuple[Pass, ...] = TRAINING if passes is None else tuple(passes)
        self.kept, self.arranges = PassMemo(), True
        self._engine, self._table = engine, table

    def stages(self, exact: bool) -> Stages:
        """The passes by their place around the plan; `exact`: of a program that runs operator by operator."""
        fusion = None if exact else self._engine.fusion(self._table)  # such a program stores every value
        return dataclasses.replace(stages_of(self._judged, fusion), arranges=self.arranges and not exact)

    def arrange(self) -> None:
        """Have plans made with graphs in the order that suits the engine again."""
        self.arranges = True

    def arranges_no_more(self, stages: Stages) -> bool:
        """Whether a plan with these passes had kernels arranged anew; plans are made without that from now on."""
        if stages.arranges:
            self.arranges = False
        return stages.arranges

    def called(self, keys: Sequence[str], exact: bool) -> tuple[Pass, ...] | None:
        """The rewrites that reduce the minimum with these keys, in their order; None where there are no such ones."""
        return self.stages(exact).called(keys)

    def lays_out(self, program: Program, exact: bool) -> bool:
        """Whether a captured training program is laid out channels last."""
        return self.stages(exact).lays_out(program, self.kept)

    def forget(self) -> None:
        """Let go of what passes made of graphs: they are lowered."""
        self.kept = PassMemo()

    @functools.cached_property
    def _judged(self) -> tuple[Pass, ...]:
        # Told once how to decide between layouts, so that what they made of a graph is known for theirs.
        return judged(self.passes, JudgedByCost(self._table)) if self._engine.strided else self.passes
