"""Tensors of the process that are no part of a model's step: another model, an average of weights, a data set.

A budget is of all that the process holds, so they are found and counted before a step runs. What the loop makes between
the model's call and backward is counted by `memopt.step.around`, and told from these here.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from memopt.budget import format_bytes
from memopt.common.garbage import collect
from memopt.memory.live_tensors import Blocks, alive, blocks_of, live_blocks
from memopt.memory.reach import shown_tensors
from memopt.torch_compat.autograd_nodes import compiled_nodes, first_nodes
from memopt.torch_compat.storages import id_of_storage

# Bytes of losses, counts and rates, which come and go: below this nothing is counted, and no change is one.
LITTLE = 1024
# The first steps, all of which are looked at; later ones ever fewer, two in a row.
_FIRST = 4
# What lies in cycles may hold others, which the next collection finds.
_COLLECTIONS = 3


class OtherTensors:
    """Those of one model's steps.

    Attributes:
        total: their bytes, as they were counted last.
    """

    def __init__(self) -> None:
        """Nothing was looked at."""
        self.total = 0
        self._steps = 0
        self._seen: Blocks = {}  # as the latest step that was looked at began
        self._counted: Blocks = {}  # of these
        self._fresh = False  # whether that is the present one
        self._made: Blocks = {}  # in calls that were planned: constants of programs, arenas
        self._between: Blocks | None = None  # since the model's call, as backward began; None where that was not seen
        self._outputs: Blocks = {}  # of the latest call

    def begins(self) -> bool:
        """A step begins; whether it is to be looked at."""
        self._steps += 1
        self._fresh = False
        return self._looks(self._steps)

    def look(
        self,
        device: torch.device,
        beside: Iterable[torch.Tensor],
        outputs: Iterable[torch.UntypedStorage],
        *,
        loop_holds: bool,
    ) -> bool:
        """Count them; whether their bytes have changed.

        Args:
            device: whose memory the budget is of.
            beside: tensors that are counted otherwise: the model's, its optimizers', arguments.
            outputs: storages of what earlier calls returned, where it is counted otherwise.
            loop_holds: whether the loop is known to hold something in backward, which is counted already.
        """
        known = {*blocks_of(beside, device), *map(id_of_storage, outputs)}
        found, counted, total = self._count(device, known, loop_holds)
        for _ in range(_COLLECTIONS):
            if total <= self.total + LITTLE:
                break
            collect()  # what imports, compilers and plans have left lies in cycles
            before = total
            found, counted, total = self._count(device, known, loop_holds)
            if total == before:
                break
        self._seen, self._fresh, self._between = found, True, None
        changed = abs(total - self.total) > LITTLE
        if changed:
            self.total = total if total > LITTLE else 0
            self._counted = counted if self.total else {}
        return changed

    def _count(self, device: torch.device, known: set[int], loop_holds: bool) -> tuple[Blocks, Blocks, int]:
        found = live_blocks(device)
        self._made = alive(self._made)
        apart = {*known, *self._made, *alive(self._outputs)}
        if self._between is not None:
            apart |= alive(self._between).keys()
        elif loop_holds:  # what was not there before may be that
            apart |= found.keys() - alive(self._seen).keys()
        counted = {key: block for key, block in found.items() if key not in apart}
        return found, counted, sum(block.nbytes for block in counted.values())

    def of_these(self, tensors: Iterable[torch.Tensor]) -> int:
        """Bytes of these tensors that were counted, as they belonged to nobody then."""
        if not self._counted:
            return 0
        storages = {id_of_storage(each.untyped_storage()) for each in tensors if each.layout is torch.strided}
        return sum(
            block.nbytes for key, block in self._counted.items() if key in storages and block.storage() is not None
        )

    def ended(self, device: torch.device, outputs: Any, *, planned: bool) -> None:
        """A call has returned.

        Args:
            device: of the model.
            outputs: what it has returned.
            planned: whether it was planned in this call: what stays of that is counted with the plan.
        """
        if not self._fresh:
            return
        outputs = shown_tensors(outputs)
        self._outputs = blocks_of(outputs, device)
        if planned:
            before = alive(self._seen)
            self._made.update((key, block) for key, block in live_blocks(device).items() if key not in before)
        if self._looks(self._steps + 1):
            reached = functools.partial(_reached, weakref.ref(self), device)
            for node in compiled_nodes(outputs) or first_nodes(outputs):
                node.register_prehook(reached)

    def _backward_begins(self, device: torch.device) -> None:
        if self._fresh and self._between is None:
            before = alive(self._seen)
            self._between = {key: block for key, block in live_blocks(device).items() if key not in before}

    @staticmethod
    def _looks(step: int) -> bool:
        return step <= _FIRST or step & (step - 1) == 0 or (step - 1) & (step - 2) == 0


def others_in_words(size: int) -> str:
    """What other tensors of the process take, for a refusal; empty where there are none."""
    return f"other tensors of the process hold {format_bytes(size, short=True)}" if size else ""


def _reached(others: weakref.ref[OtherTensors], device: torch.device, _: Any) -> None:
    here = others()
    if here is not None:
        here._backward_begins(device)
