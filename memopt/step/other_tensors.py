"""Tensors of the process that are no part of a model's step: another model, an average of weights, a data set.

A budget is of all that the process holds, so they are found and counted before a step runs. What the loop makes between
the model's call and backward is counted by `memopt.step.around`, and told from these here.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from memopt.budget import format_bytes
from memopt.common.garbage import collect
from memopt.memory.live_tensors import Blocks, alive, blocks_of, live_blocks
from memopt.memory.reach import shown_tensors
from memopt.memory.step_watch import StepWatch
from memopt.step.observed_steps import FIRST_STEPS, Looking
from memopt.torch_compat.autograd_nodes import compiled_nodes, first_nodes
from memopt.torch_compat.backward import backward_task
from memopt.torch_compat.storages import id_of_storage

# Bytes of losses, counts and rates, which come and go: below this nothing is counted, and no change is one.
LITTLE = 1024
# What grows from step to step is left growth / _GROWTH beyond what there is.
_GROWTH = 8
# What lies in cycles may hold others, which the next collection finds.
_COLLECTIONS = 3
# Backwards of one step at which is looked what the loop has made by then: it takes a third of a second each time.
_BACKWARDS = 8


class OtherTensors:
    """Those of one model's steps.

    Attributes:
        total: their bytes, as they were counted last; with room for more where they grow.
        of_step: bytes of these that graphs hold for the step's own backward, as of a part that runs before the model.
        growing: whether they grow from step to step.
    """

    def __init__(self) -> None:
        """Nothing was looked at."""
        self.total, self.of_step, self.growing = 0, 0, False
        self._steps = self._of_graphs = 0  # of the latest look the bytes that graphs hold
        self._looking, self._due = Looking(), 1  # when to look; the next step to be counted by that
        self._found: list[tuple[int, int]] = []  # the latest looks: the step, and the bytes
        self._again: int | None = None  # the step in which those that grow have used up the room that they have
        self._seen: Blocks = {}  # as the latest step that was looked at began
        self._counted: Blocks = {}  # of these
        self._fresh = False  # whether that is the present one
        self._prepares = False  # whether the present one is looked at for the sake of the next
        self._made: Blocks = {}  # in calls that were planned: constants of programs, arenas
        self._between: Blocks | None = None  # since the model's call, as backward began; None where that was not seen
        self._tasks: list[int] = []  # of backwards that have begun since then
        self._outputs: Blocks = {}  # of the latest call, if it has a backward: others are the loop's from then on
        self._calls = 0  # since an optimizer has stepped
        self._gradients = True  # whether the latest call was one with gradients
        self._turns, self._turn_due = 0, False  # to calls without; whether the step behind them is to be counted
        self._later = 0  # bytes at calls behind the first of these, as of a closure: at the first one they are gone
        _of_optimizers.add(self)

    @property
    def beside_step(self) -> int:
        """Bytes of those that a fraction is not of."""
        return self.total - self.of_step

    @property
    def is_new(self) -> bool:
        """Whether the loop is in its first steps."""
        return self._steps <= FIRST_STEPS

    def begins(self) -> bool:
        """A step begins; whether it is to be looked at."""
        self._steps += 1
        self._calls += 1
        gradients = torch.is_grad_enabled()
        turned, self._gradients = gradients is not self._gradients, gradients
        if turned and not gradients:
            self._turns += 1
            self._turn_due = self._looking.is_due(self._turns)
        # What an evaluation leaves, the best weights so far say, is there in the first step behind it.
        turned &= self._turn_due
        self._fresh, judged = False, self._steps in (self._due, self._again) or (turned and gradients)
        # What the loop holds around the model's graphs is observed in this step, too, if it is.
        if self._looking.is_due(self._steps):
            # Then in turn one or two behind it, so that both calls of a step of two are looked at.
            self._due = self._steps + (1 if self._steps <= FIRST_STEPS else 2 - self._steps.bit_length() % 2)
        self._prepares = not judged and (self._counts_next() or turned)
        return judged or self._prepares

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
        with self._looking.looks():
            if self._prepares:
                self._begins(live_blocks(device), loop_holds)
                return False
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
            self._begins(found, loop_holds)
            wanted = self._wanted(total)
            of_graphs = sum(block.nbytes for block in counted.values() if block.of_graph)
            of_step, self._of_graphs = max(self._of_graphs, of_graphs), of_graphs  # as of all: of the last two looks
            changed = abs(wanted - self.total) >= LITTLE or abs(of_step - self.of_step) >= LITTLE
            if changed:
                self.total = wanted if wanted >= LITTLE else 0
                self.of_step = min(self.total, of_step)
            if changed or abs(total - self.total) < LITTLE:  # as many bytes may be of others, as of the other batches
                self._counted = counted if self.total else {}
            return changed

    def _begins(self, found: Blocks, loop_holds: bool) -> None:
        """The present step begins, with these storages."""
        between = None
        if not self._gradients and self._turn_due:  # no backward comes: the loop's are those of the step before
            between = {} if self._between is None else alive(self._between)
            if self._between is None and loop_holds:
                before = alive(self._seen)
                between = {key: block for key, block in found.items() if key not in before}
        self._seen, self._fresh, self._between, self._tasks = found, True, between, []

    def optimizer_stepped(self) -> None:
        """An optimizer has stepped; what it holds while its closure runs is its own until then."""
        if self._calls == 1:
            self._later = 0
        self._calls = 0

    def _wanted(self, total: int) -> int:
        """What to count where there are so many bytes: as many, and more where they grow; and when to look again."""
        if self._calls > 1:
            self._later = total
        total = max(total, self._later)
        before = [item for item in self._found if item[0] != self._steps]
        self._found = [*before[-2:], (self._steps, total)]
        pairs = list(itertools.pairwise(self._found))
        rates = [(after - before) // (last - first) for (first, before), (last, after) in pairs]
        # What comes once in the first steps is none: an average of weights, say, from the second on.
        self.growing = bool(rates) and min(rates) > LITTLE and (len(rates) > 1 or self.growing)
        if not self.growing:  # calls of a step may find others, as what one without gradients has returned
            self._again = None
            return max(count for _, count in self._found[-2:])
        rate = min(rates)  # what a loop makes once between two looks, as a loss over all calls, is no growth
        grown = min(total, rate * self._steps)
        wanted = self.total if total + rate <= self.total else total + max(grown // _GROWTH, FIRST_STEPS * rate)
        self._again = self._steps + max(1, (wanted - total) // rate)
        return wanted

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
        nodes = compiled_nodes(outputs) or first_nodes(outputs)
        self._outputs = blocks_of(outputs, device) if nodes else {}
        if planned:
            before = alive(self._seen)
            self._made.update((key, block) for key, block in live_blocks(device).items() if key not in before)
        if self._counts_next():
            reached = functools.partial(_reached, weakref.ref(self), device)
            for node in nodes:
                node.register_prehook(reached)

    def _backward_begins(self, device: torch.device) -> None:
        task = backward_task()
        if not self._fresh or task in self._tasks or len(self._tasks) == _BACKWARDS:
            return
        self._tasks.append(task)
        before = alive(self._seen)
        with self._looking.looks():
            made = {key: block for key, block in live_blocks(device).items() if key not in before}
        self._between = made | (self._between or {})  # of a graph that is kept for others, what comes before the last

    def _counts_next(self) -> bool:
        """Whether the next step is to be counted."""
        return self._steps + 1 in (self._due, self._again)


def others_in_words(size: int) -> str:
    """What other tensors of the process take, for a refusal; empty where there are none."""
    return f"other tensors of the process hold {format_bytes(size, short=True)}" if size else ""


def _reached(others: weakref.ref[OtherTensors], device: torch.device, _: Any) -> None:
    here = others()
    if here is not None:
        here._backward_begins(device)


def _optimizer_stepped(_: torch.optim.Optimizer) -> None:
    for each in _of_optimizers:
        each.optimizer_stepped()


_of_optimizers: StepWatch[OtherTensors] = StepWatch(_optimizer_stepped)
