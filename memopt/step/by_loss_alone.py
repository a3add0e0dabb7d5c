"""What steps are planned for where less is enough: gradients of the loss alone, then the loss alone.

The first stage is for loops that are known to use no other gradient, and for budgets that are refused otherwise. The
second one is for the latter: it counts on a loop that lets go of what the model returns beside its loss before backward
begins.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from memopt.budget import BudgetError, format_bytes
from memopt.capture.let_go import bytes_beside_numbers
from memopt.step.script_store import ScriptStore

ALONE = "planned for gradients of the loss alone"
_LOOP = "planned for a loop that keeps the loss alone"
MORE = "more memory, or time"
_ENOUGH = "are enough for a loop that keeps the loss alone, as in `loss = model(...).loss`"


class ByLossAlone:
    """The refusals for which steps are planned so; a later run of the script knows of them before it plans.

    Attributes:
        needed: the budget that gradients of all outputs need, in words; empty as long as those are planned for.
        why: how it is known that the loop can reach the loss alone of what the model returns, whose rest is not made
            then; empty where it is not.
        held: the budget that a loop needs which holds the outputs beside the loss in backward, in words; empty as long
            as steps are planned for such loops.
    """

    def __init__(self, model: str, budget: str) -> None:
        """Of a model, by the name of its class, and its budget as the user wrote it; no graph was seen yet."""
        self.needed = self.held = self.why = ""
        self._model, self._budget, self._graph = model, budget, ""
        self._others, self._beside_bytes = False, 0
        self._store = ScriptStore("refusals")
        self._refusal: BudgetError | None = None  # of steps whose outputs are held
        self._minimum_bytes = 0  # that it names

    @property
    def notes(self) -> list[str]:
        """What the report says of it."""
        found = []
        if self.needed:
            other = f"with those of the model's other outputs the step takes {self.needed}"
            found.append(f"{ALONE}: {self.why or other}")
        if self.held:
            found.append(f"{_LOOP}: with the model's other outputs held in backward the step takes {self.held}")
        return found

    @property
    def has_seen(self) -> bool:
        """Whether a graph was seen that returns a loss."""
        return bool(self._graph)

    @property
    def stage(self) -> tuple[str, str]:
        """Tells apart what is planned for."""
        return self.needed, self.held

    @property
    def has_fewer_gradients(self) -> bool:
        """Whether a refusal leaves it to plan for gradients of the loss alone."""
        return bool(self._graph) and self._others and not self.needed and not self.held

    def sees(self, graph_module: fx.GraphModule, inputs: Sequence[Any], *, others: bool) -> None:
        """Note a graph of Dynamo's that returns a loss, and more beside it.

        Args:
            graph_module: the graph.
            inputs: of it.
            others: whether something beside the loss has a gradient, too.
        """
        self._graph, self._others = graph_key(graph_module, inputs), others
        self._beside_bytes = bytes_beside_numbers(graph_module)

    def remembers(self) -> bool:
        """Plan so from now on, if an earlier run has for this graph; whether that begins now."""
        if self.needed or self.held:
            return False
        record = self._store.get(self._model, self._budget, self._graph)
        needed, held, least = (record.get(name) for name in ("needed", "held", "minimum_bytes"))
        if not (isinstance(needed, str) and isinstance(held, str) and isinstance(least, int)):
            return False
        self.needed, self.held, self._minimum_bytes = needed, held, least
        return bool(needed or held)

    def is_known(self, why: str) -> bool:
        """The loop can reach the loss alone, and is planned for that from now on; whether that begins now.

        Args:
            why: how that is known.
        """
        if not self.has_fewer_gradients:
            return False
        self.needed, self.why = MORE, why  # of this caller: another one of the script may take more
        return True

    def is_not_known(self) -> None:
        """The loss is not what the loop takes: all that the model returns is planned for."""
        self.needed = self.why = ""

    def has_less(self, error: BudgetError, *, lets_go: bool = True) -> bool:
        """Whether there is less to plan for after a refusal, given as to `refused`."""
        if not self._graph or self.held or self.why:
            return False
        near = lets_go and 0 <= error.minimum_bytes - error.budget_bytes <= self._beside_bytes
        return near or (self._others and not self.needed)

    def refused(self, error: BudgetError, *, lets_go: bool = True) -> bool:
        """Plan for less from now on, after a refusal; False if there is no less, or no graph was seen.

        Args:
            error: the refusal.
            lets_go: whether the engine's code frees what a caller lets go of.
        """
        words = f"{format_bytes(error.minimum_bytes, short=True)} or more"
        if not self.has_less(error, lets_go=lets_go):
            return False
        if self._others and not self.needed:
            self.needed = words
        else:
            self.held, self._minimum_bytes = words, error.minimum_bytes
            error.__context__ = error.__cause__ = None
            self._refusal = error.with_traceback(None)  # whose frames would hold what the call returns
        self._keep()
        return True

    def _keep(self) -> None:
        needed = "" if self.why else self.needed
        record = {"needed": needed, "held": self.held, "minimum_bytes": self._minimum_bytes}
        self._store.put(self._model, self._budget, self._graph, record)

    def last(self, error: BudgetError) -> BudgetError:
        """The refusal to raise where there is no less to plan for: its minimum is one that every loop keeps."""
        if not self.held or error.minimum_bytes >= self._minimum_bytes:
            return error
        known = self._minimum_bytes, error.budget_bytes, None, error.stuck_bytes, error.beside
        found = self._refusal or BudgetError(*known)
        found.args = (f"{found.args[0]}; {format_bytes(error.minimum_bytes, short=True)} {_ENOUGH}",)
        self._refusal = None
        return found


def graph_key(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """What tells a graph of Dynamo's from others in every process: its code, and what its inputs are."""
    return hashlib.sha256("\n".join([graph_module.code, *described(inputs)]).encode()).hexdigest()


def described(inputs: Sequence[Any]) -> list[str]:
    """What a graph's inputs are, a line each: the same of real and of fake tensors."""
    return [
        f"{value.dtype} {tuple(value.shape)} {value.device} {value.requires_grad}"
        if isinstance(value, torch.Tensor)
        else type(value).__name__
        for value in inputs
    ]
