"""Whether a model's steps are planned for the gradients of their loss alone, as its budget is refused otherwise."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from memopt.budget import format_bytes
from memopt.step.script_store import ScriptStore


class ByLossAlone:
    """The refusal for which steps are planned so; a later run of the script knows of it before it plans.

    Attributes:
        needed: the budget that gradients of all outputs need, in words; empty as long as those are planned for.
    """

    def __init__(self, model: str, budget: str) -> None:
        """Of a model, by the name of its class, and its budget as the user wrote it; no graph was seen yet."""
        self.needed = ""
        self._model, self._budget, self._graph = model, budget, ""
        self._store = ScriptStore("refusals")

    @property
    def note(self) -> str:
        """What the report says of it."""
        found = "planned for gradients of the loss alone: with those of the model's other outputs the step takes"
        return f"{found} {self.needed}"

    def sees(self, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        """Note a graph of Dynamo's that returns a loss, and beside it what has gradients, too."""
        self._graph = graph_key(graph_module, inputs)

    def remembers(self) -> bool:
        """Plan so from now on, if an earlier run had to for this graph; whether that begins now."""
        if not self.needed:
            needed = self._store.get(self._model, self._budget, self._graph).get("needed")
            self.needed = needed if isinstance(needed, str) else ""
            return bool(self.needed)
        return False

    def refused(self, minimum_bytes: int) -> bool:
        """Plan so from now on, as all gradients need so many bytes; False if that is done, or no graph was seen."""
        if self.needed or not self._graph:
            return False
        self.needed = f"{format_bytes(minimum_bytes, short=True)} or more"
        self._store.put(self._model, self._budget, self._graph, {"needed": self.needed})
        return True


def graph_key(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """What tells a graph of Dynamo's from others in every process: its code, and what its inputs are."""
    facts = [
        f"{value.dtype} {tuple(value.shape)} {value.device} {value.requires_grad}"
        if isinstance(value, torch.Tensor)
        else type(value).__name__
        for value in inputs
    ]
    return hashlib.sha256("\n".join([graph_module.code, *facts]).encode()).hexdigest()
