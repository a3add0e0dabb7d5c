"""Of a call of several graphs, the one that makes the loss, where the loop takes nothing else of what is returned.

Logits that leave such a graph beside the loss are not made whole, and no gradient of theirs is: what stands for them
goes through the rest of the model. That holds where the loss that the loop takes is what the graph has returned, since
no other part of the model has made it of these then, and where nothing is done with what stands for them. All graphs of
a call run on fake tensors before one is planned, which shows both; later on, what does anything with it is an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from memopt.capture.result_uses import taken
from memopt.common.garbage import collect
from memopt.step.by_loss_alone import described
from memopt.torch_compat.not_returned import Untouched

# What becomes of outputs beside the loss: they are not made, or are and have no gradient. In the order they are tried.
DROPPED, DETACHED = "dropped", "detached"


class PartByLossAlone:
    """Which graph of a call that is; none, until the graphs of a call have run on fake tensors.

    Attributes:
        place: of the caller that takes the loss alone, as "file:line"; empty where there is no such graph.
    """

    def __init__(self) -> None:
        """No graph was seen."""
        self.place, self._key = "", ""
        self._ways = [DROPPED, DETACHED]
        self._asked: list[str] = []  # keys of graphs that may be it
        self._losses: list[weakref.ref[torch.Tensor]] = []  # what these have returned
        self._stands: list[weakref.ref[torch.Tensor]] = []
        self._touches = 0

    def way(self, graph_module: fx.GraphModule, inputs: Sequence[Any], place: Callable[[], str], *, dry: bool) -> str:
        """What becomes of a graph's outputs beside its loss: `DROPPED`, `DETACHED`, or empty where it is another graph.

        Args:
            graph_module: a graph of Dynamo's that returns a loss and more beside it, one of several of its call.
            inputs: of it.
            place: finds the caller that takes a loss alone; empty if there is none.
            dry: whether the graphs of a call run on fake tensors.
        """
        if not self._ways or (not dry and not self._key):
            return ""
        key = _key_of(graph_module, inputs)
        if self._key:
            return self._ways[0] if key == self._key else ""
        self.place = self.place or place()
        if self.place:
            self._asked.append(key)
        return self._ways[0] if self.place else ""

    def noted(self, run: Callable[..., Any], stands: Sequence[torch.Tensor | None]) -> Callable[..., Any]:
        """A graph's run on fake tensors, whose losses are noted, and what stands for the rest."""
        self._touches = Untouched.touches
        self._stands += [weakref.ref(stand) for stand in stands if stand is not None]

        def call(*args: Any) -> Any:
            results = run(*args)
            values = [value for value in results if isinstance(value, torch.Tensor)]
            self._losses += [weakref.ref(value) for value in values if value.numel() == 1 and value.requires_grad]
            return results

        return call

    def gives_way(self) -> bool:
        """A call has failed on fake tensors; whether its graphs come again, as others."""
        failed = bool(self._asked) and not self._key
        if failed:
            self._ways.pop(0)
            self._forget()
        return failed

    def decides(self, results: list[Any], use: str) -> bool:
        """Whether what was seen of a call's graphs bears out what they were captured for; else they come again.

        Args:
            results: what the call has returned, and nothing else; it is let go of.
            use: what the loop takes the loss by.
        """
        if self._key or not self._asked:
            return True
        loss = taken(results.pop(), use)
        if len(self._asked) > 1 or loss is None or not any(reference() is loss for reference in self._losses):
            self._ways.clear()
        else:
            collect()
            if Untouched.touches == self._touches and all(reference() is None for reference in self._stands):
                (self._key,) = self._asked
                self._forget()
                return True
            self._ways.pop(0)
        self._forget()
        return False

    def _forget(self) -> None:
        self._asked, self._losses, self._stands = [], [], []
        if not self._ways:
            self.place = ""


def _key_of(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """What a graph computes of which inputs: the same on fake tensors, which the code of a graph tells from others."""
    nodes = [f"{node.op} {node.target} {node.args} {node.kwargs}" for node in graph_module.graph.nodes]
    return "\n".join([*nodes, *described(inputs)])
