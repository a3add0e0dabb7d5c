"""Several models that share one budget: what each holds while another one's call is planned."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memopt.memory.attributes import held_tensors
from memopt.memory.optimizer import OptimizerFootprint
from memopt.memory.optimizers import NONE
from memopt.memory.resident import storage_bytes
from memopt.step.earlier_calls import EarlierCalls, Ran
from memopt.step.graph_peaks import between_graphs, step_peak
from memopt.step.optimizers import Optimizers
from memopt.step.other_tensors import OtherTensors
from memopt.step.reference import Reference

if TYPE_CHECKING:
    from memopt.calls.sessions import Sessions


_groups: weakref.WeakSet[Group] = weakref.WeakSet()  # all that there are


class Group:
    """The models of one budget, one or several.

    Attributes:
        reference: what a budget is a fraction of: one for all.
        others: tensors of the process that are no model's of these.
    """

    def __init__(self, models: Sequence[nn.Module], optimizer: Any = None) -> None:
        """Nothing was called yet.

        Args:
            models: in any order, each once.
            optimizer: all that was given for them; only of several models.

        Raises:
            ValueError: an optimizer holds no parameter of any.
        """
        self.reference, self.others = Reference(), OtherTensors()
        _groups.add(self)
        self._models = weakref.WeakSet(models)
        self._sessions: list[weakref.ref[Sessions]] = []
        self._optimizers: Optimizers | None = None
        self._needs: dict[int, int] = {}  # bytes that others' calls take before its backward, by `id` of sessions
        self._trained: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._whole = nn.ModuleList(models) if len(models) > 1 else None
        if self._whole is not None:
            self._optimizers = Optimizers(self._whole, optimizer, None, watch=True)
            self._optimizers.footprint()

    @property
    def several(self) -> bool:
        """Whether there are several models."""
        return self._whole is not None

    def joined(self, sessions: Sessions) -> None:
        """One of the models is called through these."""
        self._sessions.append(weakref.ref(sessions))

    def alive(self, own: Sessions) -> list[Ran]:
        """Calls of the other models whose backward has not run, and may."""
        return [ran for steps in self.steps(own) for ran in steps.alive()]

    def steps(self, own: Sessions) -> list[EarlierCalls]:
        """The calls of the present step of each of the other models."""
        return [each.earlier for each in self._others(own)]

    def elsewhere(self) -> int:
        """Bytes that calls of models of other budgets hold, whose backward has not run."""
        every = [each for group in _groups if group is not self for each in group._sessions]
        return sum(ran.saved for each in every if (sessions := each()) is not None for ran in sessions.earlier.alive())

    def older(self, own: Sessions) -> int:
        """Bytes of outputs of earlier steps that are still there, of the models together as one of them is called."""
        others = sum(each.around.output_bytes() for each in self._others(own) if not each.earlier.alive())
        return own.around.older_bytes() + others

    def begins(self, own: Sessions) -> None:
        """A model's call begins: the others' windows see it."""
        for each in self._others(own):
            each.around.others_run(torch.is_grad_enabled())

    def resumes(self, own: Sessions, outputs: Sequence[torch.Tensor]) -> None:
        """A model's call without gradients has returned these: the loop around it is looked at again."""
        for each in (own, *self._others(own)):
            each.around.resumes(outputs)

    def _others(self, own: Sessions) -> list[Sessions]:
        return [each for reference in self._sessions if (each := reference()) is not None and each is not own]

    def trains(self, model: nn.Module) -> None:
        """A model's step is planned: what it takes is known."""
        self._trained.add(model)

    def has_trained(self, model: nn.Module) -> bool:
        """Whether a step of a model was planned."""
        return model in self._trained

    def ran(self, own: Sessions, loss: int) -> None:
        """A call of one model has returned: what its step takes is left to it by those whose backward comes later."""
        if not self.several:
            return
        with between_graphs(loss):
            peak = step_peak([graph.peaks for ran in own.earlier.alive() for graph in ran.graphs])
        for sessions in self._others(own):
            if sessions.earlier.alive():
                key = id(sessions)
                self._needs[key] = max(peak, self._needs.get(key, 0))

    def reserve(self, own: Sessions, room: int) -> int:
        """Of the room that a model's step has, what to leave to calls of others before its backward, in bytes.

        That is half, or more that they were seen to take; before, a share for each that is expected, twice its own.
        """
        waiting = self.waiting()
        needs = self._needs.get(id(own), 0)
        return max(needs, room // 2 if needs else 0, 2 * room * waiting // (2 * waiting + 1))

    def waiting(self) -> int:
        """How many further calls are expected of a step that was not seen yet: of the other models, and its own."""
        if not self.several:
            return 0
        unseen = [each for each in self._models if each not in self._trained]
        return sum(1 for each in unseen if each.training and any(p.requires_grad for p in each.parameters()))

    def tensors(self, model: nn.Module) -> Iterator[torch.Tensor]:
        """What the other models hold: parameters, buffers, gradients, and tensors in attributes."""
        for each in self._models:
            if each is not model:
                yield from (*each.parameters(), *each.buffers(), *held_tensors(each))
                yield from (parameter.grad for parameter in each.parameters() if parameter.grad is not None)

    def optimizers(self) -> list[Any]:
        """Those that step any of several models."""
        return [] if self._optimizers is None else self._optimizers.instances()

    def set_optimizers(self) -> None:
        """Count those that the stand-ins have now, in place of what was given for several models before."""
        if self._optimizers is not None:
            alive = [each for reference in self._sessions if (each := reference()) is not None]
            own = {id(item): item for each in alive for item in each.optimizers.given}
            self._optimizers.replace(list(own.values()) or None)

    def recount(self) -> None:
        """Count the optimizers of several models by what their steps have shown."""
        if self._optimizers is not None:
            self._optimizers.due()
            self._optimizers.footprint()

    def beside(self, model: nn.Module, own: OptimizerFootprint | None) -> tuple[int, int, OptimizerFootprint | None]:
        """What is there beside one of the models for the sake of the others, in bytes.

        Args:
            model: the one.
            own: what its optimizers take.

        Returns:
            Bytes of the others' tensors, with all state of their optimizers; of gradients that they will have and have
            not; and the footprint of the model's optimizers, whose step is the largest of all.
        """
        if self._optimizers is None:
            return 0, 0, own
        mine = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
        held = storage_bytes([*mine, *self.tensors(model)]) - storage_bytes(mine)
        every, alone = self._optimizers.counted() or NONE, own or NONE
        held += max(0, every.state_bytes - alone.state_bytes)
        coming = sum(
            parameter.nbytes
            for each in self._models
            if each is not model
            for parameter in each.parameters()
            if parameter.requires_grad and parameter.grad is None
        )
        step = max(every.step_peak_bytes, alone.step_peak_bytes)
        footprint = OptimizerFootprint(alone.state_bytes, alone.existing_state_bytes, step)
        return held, coming, footprint if own is not None or self._optimizers.counted() is not None else None
