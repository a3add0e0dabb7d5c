"""How long first steps take here, by the nodes of their graphs: from one process to the next."""

from __future__ import annotations

import json
import math

import torch

from memopt.compilation.session import Session
from memopt.memory.cost.disk import Store


class Pace:
    """Seconds that planning takes for each node of a captured graph, as the last one took: of a model, or of any."""

    def __init__(self, engine: str, device: str, model: str) -> None:
        """Nothing is read yet.

        Args:
            engine: its class.
            device: kind of device.
            model: its class.
        """
        self._store = Store("pace")
        self._keys = [json.dumps([engine, device, name]) for name in (model, "")]

    @property
    def seconds(self) -> float | None:
        """Seconds for each node; None where nothing was planned here before."""
        for key in self._keys:
            found = (self._store.get(_scope(), key) or {}).get("seconds")
            if isinstance(found, float) and 0 < found < math.inf:
                return found
        return None

    def took(self, nodes: int, seconds: float) -> None:
        """Remember that graphs of so many nodes took so many seconds."""
        if nodes > 0 and seconds > 0:
            for key in self._keys:
                self._store.put(_scope(), key, {"seconds": float(seconds) / nodes})


def pace_of(session: Session) -> Pace:
    """The pace of a session's model, with its engine, where it is."""
    return Pace(type(session.engine()).__name__, session.resident.device.type, session.model_name)


def _scope() -> str:
    """How long it takes hardly depends on memopt's own version."""
    return f"torch {torch.__version__}"
