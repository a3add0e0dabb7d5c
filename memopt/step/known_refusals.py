"""Budgets that a step was found not to keep with the gradients of all its outputs: for later runs of a script."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from memopt.memory.cost.disk import Store
from memopt.step.keys import versions


class KnownRefusals:
    """What such a step takes, in words, by script, model, budget and graph. Without a folder for caches: nothing."""

    def __init__(self) -> None:
        """Nothing is read or made yet."""
        self._store, script = Store("refusals"), getattr(sys.modules.get("__main__"), "__file__", None)
        self._script = [os.getcwd(), *sys.argv[:1]] if script is None else [os.path.abspath(script)]

    def get(self, model: str, budget: str, graph: str) -> str:
        """What the step takes; empty where nothing is known.

        Args:
            model: name of its class.
            budget: as the user wrote it.
            graph: of `graph_key`.
        """
        record = self._store.get(versions(), self._key(model, budget, graph))
        needed = None if record is None else record.get("needed")
        return needed if isinstance(needed, str) else ""

    def put(self, model: str, budget: str, graph: str, needed: str) -> None:
        """Keep what it takes; as `get`."""
        self._store.put(versions(), self._key(model, budget, graph), {"needed": needed})

    def _key(self, model: str, budget: str, graph: str) -> str:
        return json.dumps([*self._script, model, budget, graph])


def graph_key(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """What tells a graph of Dynamo's from others in every process: its code, and what its inputs are."""
    facts = [
        f"{value.dtype} {tuple(value.shape)} {value.device} {value.requires_grad}"
        if isinstance(value, torch.Tensor)
        else type(value).__name__
        for value in inputs
    ]
    return hashlib.sha256("\n".join([graph_module.code, *facts]).encode()).hexdigest()
