"""Budgets that no plan keeps: refused before anything is traced if that is plain, and remembered once they are."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from memopt.budget import BudgetError
from memopt.memory.allocator import with_slack
from memopt.memory.attributes import objects_of
from memopt.memory.resident import Resident, storage_bytes
from memopt.step.memory_ledger import MemoryLedger
from memopt.step.other_tensors import others_in_words

_PLAIN = (bool, int, float, str, type(None))
_LISTS = (list, tuple, dict, set)
_MIB = 2**20

# Models whose planning takes long: by bytes of parameters, or by modules (ResNet-50 has 151 and takes some 10 s).
_LARGE_BYTES, _LARGE_MODULES = 128 * _MIB, 128


class Refusals:
    """The calls of one model that were refused, for as long as the model, its inputs and its optimizer are the same."""

    def __init__(self, model: nn.Module) -> None:
        """None was refused yet."""
        self._model = model
        self._known: dict[Any, tuple[Any, BudgetError]] = {}

    def keep(self, kind: Any, resident: Resident, error: BudgetError) -> None:
        """Such a call was refused.

        Args:
            kind: of call: shapes of inputs, mode.
            resident: what the device holds for it.
            error: the refusal.
        """
        self._known[kind] = self._state(resident), copy.copy(error)

    def raise_known(self, kind: Any, resident: Resident) -> None:
        """Refuse a call like one that was refused, at once.

        Raises:
            BudgetError: nothing has changed since.
        """
        if kind not in self._known:
            return
        state, error = self._known.pop(kind)
        if state == self._state(resident):
            self._known[kind] = state, error
            raise copy.copy(error)

    def __bool__(self) -> bool:
        return bool(self._known)

    def _state(self, resident: Resident) -> Any:
        held = torch.cuda.memory_allocated(resident.device) // _MIB if resident.device.type == "cuda" else 0
        return resident, held, state_of(self._model)


def state_of(model: nn.Module) -> Any:
    """What a model's memory goes by, beside its inputs: kinds of its tensors, and what its modules hold."""
    tensors = [*model.parameters(), *model.buffers()]
    kinds = [(tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad) for tensor in tensors]
    objects = [{name: _seen(value) for name, value in vars(item).items()} for item in objects_of(model)]
    return kinds, [_attributes(module) for module in model.modules()], objects


def _attributes(module: nn.Module) -> Any:
    """What forward may go by: switches and settings of a module."""
    found = {name: _seen(value) for name, value in vars(module).items() if name not in ("_parameters", "_buffers")}
    return type(module), found


def _seen(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, _LISTS):
        return str(value) if len(value) < 100 else (id(value), len(value))
    return id(value)


def refuse_hopeless(account: MemoryLedger, ending: int = 0) -> None:
    """Refuse a budget in bytes that does not hold what is there before and after the step itself.

    It is for models that are large: others are planned all the same, so that a refusal names a minimum of some plan.

    Args:
        account: of the model's steps.
        ending: bytes of the gradients that an optimizer finds which is not counted yet; 0 without one.

    Raises:
        BudgetError: its minimum is one that no plan goes below.
    """
    budget, resident = account.budget, account.resident
    if budget is None or budget.bytes is None:
        return
    stepping = resident.total - resident.gradients + ending
    held = max(resident.total, stepping, account.optimizer_peak()) - resident.libraries
    if held > account.usable(budget.bytes):
        least, beside = with_slack(held, resident.device), others_in_words(resident.others)
        raise BudgetError(least, budget.bytes, Held(resident, ending), beside=beside, at_least=True)


def is_large(model: nn.Module) -> bool:
    """Whether a model takes long to plan."""
    return sum(1 for _ in model.modules()) >= _LARGE_MODULES or storage_bytes(list(model.parameters())) >= _LARGE_BYTES


class Held:
    """What a hopeless budget does not hold, in bytes."""

    activations = workspace = 0

    def __init__(self, resident: Resident, ending: int = 0) -> None:
        """Of what the device holds, and of gradients that are not in that."""
        self.parameters, self.buffers, self.inputs = resident.parameters, resident.buffers, resident.inputs
        self.optimizer_state = resident.optimizer_state
        known = resident.trainable if resident.optimizer is not None else resident.gradients
        self.gradients = max(known, ending)
