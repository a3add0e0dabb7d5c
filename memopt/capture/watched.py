"""An inference function of a graph that is captured, which folds weights anew when they have changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from memopt.capture.joint import constants_to_attributes
from memopt.memory.allocator_limit import limit_leaves
from memopt.memory.optimizer_steps import stepped_since, steps_seen, watch_steps
from memopt.program import InputKind, Program, draws_numbers
from memopt.torch_compat.boxed import boxed
from memopt.torch_compat.storages import version_of

Rewrite = Callable[..., Program]  # of values by name, and whether they are trained
_TRAINED = 3  # changes after which weights are taken for trained


class Watched:
    """An inference function that notices when a weight folded into its program has changed, and folds anew.

    A change is seen by the tensor's version counter and address: `load_state_dict`, in-place arithmetic and a replaced
    storage are noticed; writes through `tensor.data` are invisible to PyTorch itself. So are those of fused optimizers:
    the steps of all optimizers are watched. Weights that have changed so several times are trained: they are read no
    more, as folding them anew for each evaluation takes longer than it saves.
    """

    def __init__(
        self,
        program: Program,
        rewrite: Rewrite,
        build: Callable[[fx.GraphModule], Callable[[list[Any]], Sequence[Any]]],
    ) -> None:
        self._rewrite, self._build, self._changes = rewrite, build, 0
        self._others: Iterable[Watched] = ()
        self._arguments = [entry for entry in program.inputs if entry.kind is not InputKind.CONSTANT]
        boxed(self)
        self._stamp: list[tuple[int, int]] = []
        self._draws = any(draws_numbers(node) for node in program.calls)
        self._install(program)

    def _install(self, program: Program) -> None:
        self._baked = [index for index, entry in enumerate(self._arguments) if entry.name in program.baked]
        self._run = self._compile(program)
        self._stamp = [_stamp(program.state[self._arguments[index].name]) for index in self._baked]
        self._steps = watch_steps(self) if self._baked else 0

    def _compile(self, program: Program) -> Callable[[list[Any]], Sequence[Any]]:
        return self._build(constants_to_attributes(program))

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run on a list of inputs, which is emptied.

        What is folded is looked at while the device works, and what was computed from old values is recomputed;
        before the run where that draws random numbers.
        """
        self._have_others_release()
        if not self._baked:
            return self._run(args)
        given = list(args)
        if self._draws:
            self._follow(given)
            return self._run(args)
        results = self._run(args)
        return self._run(given) if self._follow(given) else results

    def lies_beside(self, others: Iterable[Watched]) -> None:
        """These, of which it may be one, hold memory within the same limit."""
        self._others = others

    def _have_others_release(self) -> None:
        """Have others give back what they hold, where memory that is about to be taken has no room beside that."""
        missing = getattr(self._run, "missing_bytes", 0)
        if missing == 0 or limit_leaves(missing):
            return
        for each in list(self._others):
            if each is not self:
                each.release()

    def release(self) -> None:
        """Give back what is held between calls; the next call takes it again."""
        release = getattr(self._run, "release", None)
        if release is not None:
            release()

    def _follow(self, given: Sequence[Any]) -> bool:
        """Fold anew where a weight has changed; whether that was so."""
        if [_stamp(given[index]) for index in self._baked] == self._stamp:
            if self._steps == steps_seen():
                return False
            since, self._steps = self._steps, steps_seen()
            if not stepped_since(since, [given[index] for index in self._baked]):
                return False
        self._changes += 1
        state = {
            entry.name: value.detach()
            for entry, value in zip(self._arguments, given, strict=True)
            if entry.kind in (InputKind.PARAMETER, InputKind.BUFFER)
        }
        self._install(self._rewrite(state, True) if self._changes >= _TRAINED else self._rewrite(state))
        return True


def _stamp(tensor: torch.Tensor) -> tuple[int, int]:
    return version_of(tensor), tensor.data_ptr()
