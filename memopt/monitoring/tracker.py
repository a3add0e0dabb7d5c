"""Tracker: every storage on a device with who made it, and when, for as long as it is there."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from memopt.graph.result_memory import taken_beside
from memopt.memory.ledger import Ledger
from memopt.monitoring.lines import NOWHERE, Place
from memopt.monitoring.modules import ModuleWatch, Names
from memopt.torch_compat import pytree
from memopt.torch_compat.backward import backward_task
from memopt.torch_compat.fake_tensors import FakeTensor
from memopt.torch_compat.storages import storage_id

_MANY = 10_000
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Origin(NamedTuple):
    """Where a storage comes from: those of one origin are alike."""

    phase: str
    module: str
    place: Place
    operator: Any
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclasses.dataclass(slots=True)
class Made:
    """One storage: its origin, its bytes, the step that made it, and the modules that ran, outermost first.

    `born` and `died` say how many storages had been entered by then; `died` is -1 while it is there.
    """

    origin: Origin
    nbytes: int
    step: int
    born: int
    within: Names
    died: int = -1


class Tracker(Ledger):  # type: ignore[no-untyped-call]
    """Knows what operators make and read on one device, in this thread and in autograd's work for it.

    Not seen is what compiled code allocates for itself, until an operator is called with it.

    Attributes:
        modules: what is told of storages, and says which modules run.
        step: the number of the step that runs.
        stepping: whether an optimizer steps.
        made: what is there, by storage.
        gone: what was there at the step's peak and has gone, and more that has gone.
        old_gone: by origin, how many have gone that were made before the step before.
        peak_birth: how many storages had been entered when `peak` was reached.
    """

    def __init__(
        self, device: torch.device, modules: ModuleWatch, short: Callable[[torch.OutOfMemoryError], None]
    ) -> None:
        """Nothing is known yet.

        Args:
            device: the only one whose storages are looked at.
            modules: which run.
            short: is called with an error of too little memory, within the operator that met it.
        """
        super().__init__(device)
        self.modules = modules
        self.step = 0
        self.stepping = False
        self.made: dict[int, Made] = {}
        self.gone: list[Made] = []
        self.old_gone: Counter[Origin] = Counter()
        self.births = self.peak_birth = 0
        self._short = short
        self._phase, self._operator = "", None
        self._in_backward = False

    def look(self) -> tuple[str, Place, Names]:
        """What runs now: the phase, the user's place, and the modules."""
        place, names = self.modules.look(sys._getframe(1), self.live)
        if backward_task() >= 0:
            return "backward", place, names
        return "optimizer" if self.stepping else "forward" if names else "loop", place, names

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operator, and enter the storages of its results, and of operands that are not known yet."""
        kwargs = kwargs or {}
        in_backward = backward_task() >= 0
        if in_backward and not self._in_backward:
            self.forward_ends()
        self._in_backward = in_backward
        self._look(pytree.tree_leaves((args, kwargs)), "unseen", None)
        try:
            result = func(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            self._short(error)
            raise
        kept, passing = taken_beside(func, args, result)
        self._look([result] if isinstance(result, torch.Tensor) else pytree.tree_leaves(result), "", func, kept)
        if passing:
            self._reach(self.live + passing)
        return result

    def see(self, tensors: Iterable[torch.Tensor], phase: str) -> None:
        """Enter what is there already; what is known stays as it is."""
        self._look(tensors, phase, None)

    def forward_ends(self) -> None:
        """What modules made in this step and is there now is what backward needs of them."""
        self.modules.forward_ends(
            (made.within, made.nbytes)
            for made in self.made.values()
            if made.within and made.step == self.step and made.origin.phase == "forward"
        )

    def next_step(self) -> None:
        """A step has ended."""
        self.step += 1
        self.gone.clear()
        self.peak, self.peak_birth = self.live, self.births

    def at_peak(self) -> list[Made]:
        """What was there at the step's peak."""
        moment = self.peak_birth
        return [
            *(made for made in self.made.values() if made.born <= moment),
            *(made for made in self.gone if made.born <= moment < made.died),
        ]

    def entered(self, key: int, size: int, plain: torch.Tensor) -> None:
        """A storage is new."""
        self.births += 1
        phase, place, within = self._phase, NOWHERE, Names()
        if phase != "before":
            self.live -= size  # as it was when this began
            now, place, within = self.look()
            self.live += size
            phase = phase or now
        if phase == "unseen":
            self.modules.was_there(size)
        origin = Origin(phase, within[-1] if within else "", place, self._operator, tuple(plain.shape), plain.dtype)
        self.made[key] = Made(origin, size, self.step, self.births, within)
        self._reach(self.live)

    def released(self, key: int, size: int) -> None:
        """A storage has gone."""
        super().released(key, size)
        made = self.made.pop(key)
        made.died = self.births + 1  # it is not there together with the next one
        self.gone.append(made)
        if len(self.gone) % _MANY == 0:  # a step may be endless: what was not there at the peak is of no use
            self.gone = [made for made in self.gone if made.born <= self.peak_birth < made.died]
        if made.step < self.step - 1:
            self.old_gone[made.origin] += 1

    def _look(self, leaves: Iterable[Any], phase: str, operator: Any, more: int = 0) -> None:
        self._phase, self._operator = phase, operator
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor) or isinstance(leaf, FakeTensor) or leaf.device != self.device:
                continue
            try:
                known = type(leaf) in _PLAIN and leaf.layout is torch.strided and storage_id(leaf) in self.references
                if not known:
                    self.enter(leaf, counted=True, more=more)
            except (RuntimeError, NotImplementedError):  # of a subclass that shows no storage
                continue

    def _reach(self, live: int) -> None:
        self.modules.reach(live)
        if live >= self.peak:
            self.peak, self.peak_birth = live, self.births
