"""The optimizers of one model: those that were given, and those that are seen to step its parameters."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from memopt.budget import format_bytes
from memopt.memory.optimizer import OptimizerFootprint, is_optimizer, name_of, parameters_of, state_bytes
from memopt.memory.optimizer_minimum import minimum_state_bytes
from memopt.memory.optimizers import Counted, count, holding, holds_some, listed, together, was_given_some
from memopt.memory.reach import optimizers_in
from memopt.memory.step_watch import StepWatch
from memopt.torch_compat.modules import requires_gradients
from memopt.torch_compat.storages import version_of

_AHEAD = 4  # steps whose growth is counted ahead


class Optimizers:
    """Counts a model's optimizers, and notices what is known only of their steps.

    A hook of all optimizers' steps is there as long as some model under a budget is: it learns of those that were not
    given, and of state that no copy of an optimizer tells. What it notices is counted before the next call.

    Attributes:
        notes: lines for the user.
    """

    def __init__(self, model: nn.Module, given: Any, place: torch.device | None, *, watch: bool) -> None:
        """Nothing is counted yet.

        Args:
            model: whose parameters are stepped.
            given: what the user gave: an optimizer, several, what makes one, or None.
            place: the device to count for, where it is not the model's own.
            watch: whether to look at steps.

        Raises:
            TypeError: something else is among what was given.
        """
        self._model, self._place, self._watch = model, place, watch
        self._set(given)
        self._calls, self._written = 0, -1  # calls that found parameters written to by nobody known; by what version
        self._learned: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._steps: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._footprint: OptimizerFootprint | None = None
        self._trained: tuple[bool, ...] | None = None
        self._alone: dict[int, Counted] = {}  # by `id`, before any step
        # By `id`: the latest looks at state, as steps so far and bytes; and the bytes that are counted.
        self._sizes: dict[int, tuple[tuple[tuple[int, int], ...], int]] = {}
        self._due = False
        self.notes: list[str] = []
        if watch:
            _watch.add(self)

    def replace(self, given: Any) -> None:
        """Count these from now on, in place of those given before.

        Raises:
            TypeError: as for the constructor.
        """
        self._set(given)
        self._learned.clear()
        self._steps.clear()
        self._alone.clear()
        self._sizes.clear()
        self._due = True

    def _set(self, given: Any) -> None:
        items, parameters = listed(given), list(self._model.parameters())
        # Those that have stepped are their loop's: of one that it lets go of the state is to go, too.
        self._given: list[Callable[[], Any]] = [functools.partial(_itself, item) for item in items]
        self._expected = any(not is_optimizer(item) for item in items)  # what one makes is none that was not given
        self._of_model = {id(item) for item in items if is_optimizer(item) and was_given_some(item, parameters)}

    @property
    def given(self) -> tuple[Any, ...]:
        """What the user gave and still has: optimizers, and what makes one."""
        return tuple(item for find in self._given if (item := find()) is not None)

    def _forget_gone(self) -> None:
        """Count anew if the loop has let go of an optimizer that was given."""
        if any(find() is None for find in self._given):
            self._given = [find for find in self._given if find() is not None]
            self._alone.clear()
            self._sizes.clear()
            self._steps.clear()  # what one wrapped may step on, as none that was given
            self._due = True

    def footprint(self) -> OptimizerFootprint | None:
        """What the optimizers hold and take; None without any.

        They are counted anew where other parameters are trained, or a step has shown something.

        Raises:
            ValueError: one that was given holds none of these parameters.
        """
        trained = requires_gradients(self._model)
        if self._due or trained != self._trained:
            if trained != self._trained:
                self._alone.clear()
            self._count()
            self._trained = trained
        return self._footprint

    def minimum(self) -> OptimizerFootprint:
        """What they hold at least, which takes no step of all parameters to know."""
        state = minimum_state_bytes([*self.given, *self._learned], list(self._model.parameters()), self._place)
        return OptimizerFootprint(state, 0, 0)

    def due(self) -> bool:
        """Whether a step before this call has shown something that may have to be counted anew."""
        self._forget_gone()
        if self._watch and not self._steps and not self._given:
            self._look()
        return self._due

    def _look(self) -> None:
        """Look for an optimizer whose steps call no hooks, as compiled ones, where parameters were written to."""
        version = next((version_of(p) for p in self._model.parameters() if p.requires_grad), -1)
        if version == self._written:
            return
        self._calls, before, self._written = self._calls + 1, self._written, version
        if before != -1 and self._calls & (self._calls - 1) == 0:
            for item in gc.get_objects():
                if issubclass(type(item), torch.optim.Optimizer) and item.__dict__.get("state"):
                    self.stepped(item)

    def counted(self) -> OptimizerFootprint | None:
        """The same as it was counted last, whatever is trained now."""
        return self._footprint

    def instances(self) -> list[Any]:
        """The optimizers that there are: those that were given, not what makes one, and those that were learned of."""
        return [item for item in (*self.given, *self._learned) if is_optimizer(item)]

    def stepping(self, names: frozenset[str]) -> int:
        """The most bytes that the step of one takes which holds only these parameters, all of one module.

        That is how hooks of parameters have optimizers of their own, and step them within backward.
        """
        name_of_parameter = {id(p): name for name, p in self._model.named_parameters() if name in names}
        sizes = [0]
        for item in self.instances() if names else ():
            held = [name_of_parameter.get(id(p)) for p in parameters_of(item)]
            modules = {None if name is None else name.rpartition(".")[0] for name in held}
            if len(modules) == 1 and None not in modules and id(item) in self._alone:
                sizes.append(self._alone[id(item)].footprint.step_peak_bytes)
        return max(sizes)

    def state_bytes(self) -> int:
        """Bytes that their state takes by now, where the parameters lie."""
        device = next((p.device for p in self._model.parameters()), torch.device("cpu"))
        return sum(state_bytes(item, self._model.parameters(), device) for item in self.instances())

    def _count(self) -> None:
        parameters = list(self._model.parameters())
        self._due, self.notes = False, []
        found, learned = [], dict[str, int]()
        for item in (*self.given, *self._learned):
            if id(item) not in self._alone:
                self._alone[id(item)] = self._count_alone(item, parameters)
            alone = self._alone[id(item)]
            if any(inner in self._steps for inner in optimizers_in(item)):
                size = state_bytes(item, parameters, parameters[0].device)
                footprint = holding(alone, size).footprint
                state = max(footprint.state_bytes, self._with_growth(item, size))
                alone = Counted(dataclasses.replace(footprint, state_bytes=state))
            if item in self._learned and not self._expected and alone.footprint.state_bytes:
                size = learned.get(name_of(item), 0) + alone.footprint.state_bytes
                learned[name_of(item)] = size
            found.append(alone)
        every = together(found)
        self._footprint = every.footprint if found else None
        self.notes += [f"{name} is counted after its first step: its state until then is not" for name in every.later]
        for name, size in learned.items():
            shown = format_bytes(size, short=True)
            self.notes.append(f"{name} was not given as optimizer: its state, {shown}, counts since its first step")

    def _count_alone(self, item: Any, parameters: Sequence[torch.Tensor]) -> Counted:
        """One by itself; where it has stepped, or nothing is trained, it may have no parameter that trains any more."""
        stepped = is_optimizer(item) and any(inner in self._steps for inner in optimizers_in(item))
        if id(item) in self._of_model and not was_given_some(item, parameters):
            own = parameters_of(item)  # other weights stand in their place, as within `functional_call`
            if any(p.requires_grad for p in own):
                return count([item], own, self._place)
        if any(p.requires_grad for p in parameters) and not (stepped and not holds_some(item, parameters)):
            return count([item], parameters, self._place)
        size = state_bytes(item, parameters, parameters[0].device) if is_optimizer(item) and parameters else 0
        return Counted(OptimizerFootprint(size, size, 0))

    # -- steps ---------------------------------------------------------------------------------------------------

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer, of this model or another, has stepped."""
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._steps.get(optimizer)
        if known is None:
            self._forget_gone()
            if not was_given_some(optimizer, list(self._model.parameters())):
                return
            given = {id(inner): number for number, item in enumerate(self.given) for inner in optimizers_in(item)}
            if id(optimizer) in given:
                number = given[id(optimizer)]
                self._given[number] = _weakly(self.given[number])
            elif not self._covers(optimizer):
                # What makes an optimizer stood for this one.
                self._given = [find for find in self._given if is_optimizer(find())]
                self._learned.add(optimizer)
                self._alone.pop(id(optimizer), None)  # of one that is gone, and lay there
                self._sizes.pop(id(optimizer), None)
        steps = 1 if known is None else known[0] + 1
        self._steps[optimizer] = steps, size
        # State may come later, as that of a wrapper which acts at every fifth step: looked for ever more rarely.
        if steps & (steps - 1) == 0 or known is None or known[1] != size or self._grows(optimizer):
            self._due = True
        if known is not None and known[1] != size:
            self._alone.clear()

    def _grows(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it is looked at after each step: no step on fake tensors told what it holds, or that has grown."""
        known = [item for item in self.instances() if id(item) in self._alone]
        items = [item for item in known if item is optimizer or optimizer in optimizers_in(item)]
        return any(self._alone[id(item)].later or self._growth(item, 1) for item in items)

    def _growth(self, item: Any, pairs: int) -> int:
        """Bytes by which its state has grown in a step, at least, as so many pairs of looks tell; 0 before."""
        seen, _ = self._sizes.get(id(item), ((), 0))
        found = [(size - before) // (step - last) for (last, before), (step, size) in itertools.pairwise(seen)]
        return max(0, min(found[-pairs:])) if len(found) >= pairs else 0

    def _with_growth(self, item: Any, size: int) -> int:
        """Bytes of its state to count: with room for some steps where it grows with each, as a history does."""
        steps = sum(self._steps[inner][0] for inner in optimizers_in(item) if inner in self._steps)
        seen, counted = self._sizes.get(id(item), ((), 0))
        seen = (*[known for known in seen if known[0] < steps][-2:], (steps, size))
        self._sizes[id(item)] = seen, counted
        rate = self._growth(item, 2)  # what comes once, in a later step than the first, is no growth
        counted = counted if rate and size + rate <= counted else size + _AHEAD * rate
        self._sizes[id(item)] = seen, counted
        return counted

    def _covers(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether one that was learned of wraps it; those that it wraps itself are not to be counted beside it."""
        inner = {id(item) for item in optimizers_in(optimizer)}
        for known in list(self._learned):
            if id(known) in inner:
                self._learned.discard(known)
        return any(id(optimizer) in map(id, optimizers_in(known)) for known in self._learned)


def _itself(item: Any) -> Any:
    return item


def _weakly(item: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(item) if is_optimizer(item) else functools.partial(_itself, item)
    except TypeError:  # a wrapper of a user's, with slots
        return functools.partial(_itself, item)


def _after_step(optimizer: torch.optim.Optimizer) -> None:
    for item in _watch:
        item.stepped(optimizer)


_watch: StepWatch[Optimizers] = StepWatch(_after_step)
