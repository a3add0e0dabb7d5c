"""Which gradients of one graph its backward hands over before it ends, from its capture to the code that does so."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from memopt.capture.joint import positions
from memopt.memory.aliasing import analyse
from memopt.memory.hand_over import Handing, gives_gradients_only, handing
from memopt.program import Program
from memopt.step.hooked import EarlyGradients, ToBeGone


class Handed:
    """Those of one graph, by their parameters' names; none as long as no engine is able to hand any over.

    Attributes:
        early: those that are wanted before backward ends.
        gone: of these, those that are gone then.
        how: how the backward graph that was cut last hands them over; None: it returns all in the end.
    """

    def __init__(self) -> None:
        """No engine is able to."""
        self.early = self.gone = frozenset[str]()
        self.how: Handing | None = None
        self._wanted: EarlyGradients | None = None

    def may(self, wanted: EarlyGradients | None) -> None:
        """An engine is able to hand over what is wanted early, where anything is."""
        self._wanted = wanted

    def find(self, captured: Program, lacks: Callable[[], bool]) -> None:
        """Find them in a captured program.

        Args:
            captured: the joint program.
            lacks: whether the budget may need those handed over that are only added to existing ones.
        """
        wanted = self._wanted
        self.early = self.gone = frozenset()
        if wanted is not None and gives_gradients_only(captured, positions(captured.graph_module)):
            added = wanted.added if wanted.added and lacks() else frozenset()
            self.early, self.gone = wanted.hooked.early | added, wanted.hooked.gone | added

    def cut(self, program: Program) -> None:
        """Learn the program that is partitioned now."""
        self.how = handing(program, analyse(program), positions(program.graph_module)) if self.gone else None

    def watched(self, places: Callable[[Collection[str]], Sequence[int]]) -> ToBeGone:
        """The inputs whose gradients are to be gone once they are handed over.

        Args:
            places: of parameters by these names among the inputs of Dynamo's graph.
        """
        assert self._wanted is not None
        hooked = self._wanted.hooked
        return ToBeGone(places(hooked.names), hooked.keeps, places(self.gone - hooked.gone), hooked.waits)
