"""What one run of a script has found, for its later runs."""

from __future__ import annotations

import json
import os
import sys

from memopt.memory.cost.disk import Record, Store
from memopt.step.keys import versions


class ScriptStore:
    """Records by script, model, budget and graph, below the folder for caches; without one nothing is known.

    A process without a script, a notebook's or one that another process began, goes by its working directory too.
    """

    def __init__(self, kind: str) -> None:
        """Nothing is read or made yet; `kind` names the folder."""
        self._store, script = Store(kind), getattr(sys.modules.get("__main__"), "__file__", None)
        self._script = [os.getcwd(), *sys.argv[:1]] if script is None else [os.path.abspath(script)]

    def get(self, model: str, budget: str, graph: str) -> Record:
        """The record that was put; empty if there is none.

        Args:
            model: name of its class.
            budget: as the user wrote it.
            graph: what tells a graph from others in every process.
        """
        return self._store.get(versions(), self._key(model, budget, graph)) or {}

    def put(self, model: str, budget: str, graph: str, record: Record) -> None:
        """Keep a record; as `get`."""
        self._store.put(versions(), self._key(model, budget, graph), record)

    def _key(self, model: str, budget: str, graph: str) -> str:
        return json.dumps([*self._script, model, budget, graph])
