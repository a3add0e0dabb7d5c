"""What a step that was refused is planned for instead."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from memopt.budget import BudgetError
from memopt.capture.caller import takes_loss_alone
from memopt.capture.result_uses import taken
from memopt.compilation.part_by_loss_alone import PartByLossAlone
from memopt.step.by_loss_alone import ALONE, ByLossAlone
from memopt.torch_compat.autograd_nodes import compiled_nodes
from memopt.torch_compat.side_effects import leaves_more_than_its_result

if TYPE_CHECKING:
    from memopt.compilation.session import Session


class Fallbacks:
    """In this order: a call by itself, a fraction of a larger step, gradients of the loss alone, the loss alone.

    A step is larger by models that share the budget and were not called yet, by more of what the model is only a part
    of, or by gradients that it begins with.

    Attributes:
        by_loss_alone: the last two of them, and for which of them it is planned.
        part: the same, of a call of several graphs.
    """

    def __init__(self, model: str, budget: str) -> None:
        """Of a model, by the name of its class, and its budget as the user wrote it; nothing was refused yet."""
        self.by_loss_alone = ByLossAlone(model, budget)
        self.part = PartByLossAlone()
        self._use = ""  # what its callers take a loss by, as their code proves, and nothing else
        self._waited = False  # whether a fraction was of more, as other models were not called yet
        self._parts: set[int] = set()  # calls of a step before one that was let do, as more of the step may come

    def plan_for_less(self, session: Session, refused: BudgetError) -> None:
        """Plan what was refused anew, for the next of them.

        Raises:
            BudgetError: there is no less to plan for.
        """
        if session.one_call() or self._waits_for_others(session, refused) or self._waits_for_rest(session, refused):
            return
        if self._begins_with_gradients(session):
            return
        may = _may_begin_anew(session)
        if not may or not self.by_loss_alone.refused(refused, lets_go=session.engine().frees_outputs):
            raise self.by_loss_alone.last(refused)
        self._go_by_loss_alone(session)

    def has_less_than(self, session: Session, refused: BudgetError) -> bool:
        """Whether `plan_for_less` will have what was refused planned anew: its minimum is not the last word then."""
        waits = self._waiting_fraction(session) is not None or self._fraction_of_part(session) is not None
        if session.counts_on_expected or waits:
            return True
        may = _may_begin_anew(session)
        return may and self.by_loss_alone.has_less(refused, lets_go=session.engine().frees_outputs)

    def plans_for_loss_alone(
        self, session: Session, graph_module: fx.GraphModule, inputs: Sequence[Any], *, others: bool, whole: bool
    ) -> bool:
        """Whether it is planned for gradients of the loss alone, or less: now, or in an earlier run of the script.

        Args:
            session: whose graph it is.
            graph_module: a graph of Dynamo's that returns a loss.
            inputs: of it.
            others: whether something beside the loss has a gradient, too.
            whole: whether the graph is all of its call, which returns to the caller what the graph does.
        """
        if session.budget is None:
            return False
        self.by_loss_alone.sees(graph_module, inputs, others=others)
        known = whole and _may_begin_anew(session) and self._is_known()
        if known or (_may_go_by_loss_alone(session) and self.by_loss_alone.remembers()):
            self._go_by_loss_alone(session)
        return any(self.by_loss_alone.stage)

    def _is_known(self) -> bool:
        """Whether it is planned for the loss alone from now on, as its callers are known to take nothing else."""
        place = self._place()
        return bool(place) and self.by_loss_alone.is_known(f"{place} takes nothing else of what the model returns")

    def _place(self) -> str:
        """Where the loss alone is taken of what the graph that is being compiled returns; empty where more may be."""
        found = None if not self._use or leaves_more_than_its_result() else takes_loss_alone()
        return "" if found is None or found.use != self._use else found.place

    def way_of_part(self, session: Session, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> str:
        """What becomes of the outputs beside its loss of one of several graphs of a call; empty where they stay.

        Args:
            session: whose graph it is.
            graph_module: a graph of Dynamo's that returns a loss, and more that has gradients.
            inputs: of it.
        """
        if not self._use or not _may_go_by_loss_alone(session):
            return ""
        way = self.part.way(graph_module, inputs, self._place, dry=session.dry)
        if way and not session.dry:
            session.note(f"{ALONE}: {self.part.place} takes nothing else of what the model returns")
        return way

    def decides(self, outputs: list[Any]) -> bool:
        """Whether the graphs of a call that has run on fake tensors are those to plan; else they come again, as others.

        Args:
            outputs: of the call, in a list that is emptied.
        """
        return self.part.decides(outputs, self._use)

    def is_for(self, use: str) -> None:
        """All calls of the session are of code that takes a loss by this, and nothing else; empty: it may take more."""
        self._use = use

    def lacks(self, session: Session, outputs: Any) -> bool:
        """Whether what callers take of a call's result is not the loss that was made; all is planned for then.

        Args:
            session: of the call.
            outputs: of it.
        """
        loss = taken(outputs, self._use) if self.by_loss_alone.why else None
        if not self.by_loss_alone.why or (isinstance(loss, torch.Tensor) and compiled_nodes(loss, behind=False)):
            return False
        self._use = ""
        for note in self.by_loss_alone.notes:
            session.unsay(note)
        self.by_loss_alone.is_not_known()
        session.forget_step()
        return True

    def raise_if_hopeless(self, session: Session, least: int) -> None:
        """Have a step that no code can keep the budget with planned for gradients of the loss alone, where it may be.

        Args:
            session: whose step it is.
            least: bytes that any code of the plan that was made last takes above what is resident.

        Raises:
            BudgetError: that takes more, and the step is planned for less then (`plan_for_less`).
        """
        step = session.step
        may = self.by_loss_alone.has_fewer_gradients and _may_begin_anew(session)
        if may and step is not None and not session.feasible and session.excess_with(least):
            raise BudgetError(session.minimum_budget(step.base + least), session.limit_bytes, beside=session.beside)

    def _waits_for_others(self, session: Session, refused: BudgetError) -> bool:
        """Whether what was refused is let do, as the fraction is of a step with models that were not called yet."""
        fraction = self._waiting_fraction(session)
        if fraction is None:
            return False
        self._waited = True
        session.reference.at_least(math.ceil(refused.minimum_bytes / fraction) + 1)
        session.forget_step()
        return True

    def _waiting_fraction(self, session: Session) -> float | None:
        """The fraction that may still be of more models' step; None where there is none."""
        fraction = _enforced_fraction(session)
        return fraction if fraction is not None and not self._waited and session.waiting() else None

    def _waits_for_rest(self, session: Session, refused: BudgetError) -> bool:
        """Whether what was refused is let do, as the fraction is of a step not seen whole yet: of a cell's calls."""
        fraction = self._fraction_of_part(session)
        if fraction is None:
            return False
        self._parts.add(len(session.earlier))
        session.reference.supposes(math.ceil(refused.minimum_bytes / fraction) + 1)
        session.forget_step()
        return True

    def _fraction_of_part(self, session: Session) -> float | None:
        """The fraction that may still be of more than this call and those before it; None where there is none."""
        fraction = _enforced_fraction(session)
        if fraction is None or session.reference.whole or len(session.earlier) in self._parts:
            return None
        return fraction if session.role.trains and session.part() else None

    def _begins_with_gradients(self, session: Session) -> bool:
        """Whether what was refused may take more, as eager holds gradients in it that the first step did not have."""
        gradients = session.resident.gradients if _enforced_fraction(session) is not None else 0
        if session.step is None or not gradients or not session.role.trains:
            return False
        grown = session.reference.begins_with_gradients(session.step.whole, gradients)
        if grown:
            session.forget_step()
        return grown

    def _go_by_loss_alone(self, session: Session) -> None:
        session.forget_step()
        for note in self.by_loss_alone.notes:
            session.note(note)


def _enforced_fraction(session: Session) -> float | None:
    """The fraction that the budget is; None where it is no fraction, or only aimed at."""
    return None if session.budget is None or session.soft else session.budget.fraction


def _may_begin_anew(session: Session) -> bool:
    """Whether a step that was refused may go by the loss alone: its graph is not one of several."""
    return not session.broken and _may_go_by_loss_alone(session)


def _may_go_by_loss_alone(session: Session) -> bool:
    """Not where the user has all gradients compared, or calls share a step."""
    alone = not (session.soft or session.calls > 1 or session.earlier)
    return session.budget is not None and session.verify != "full" and alone
