"""`verify="full"`: a model's compiled call beside the model itself, from its arguments to all that the call changes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from memopt.calls.before_call import BeforeCall
from memopt.calls.between import writes_between
from memopt.calls.outcome import outcome_of
from memopt.calls.sides import Sides
from memopt.evidence import EvidenceError
from memopt.torch_compat.dead_draws import dead_draws_kept


class ModelError(EvidenceError):
    """The compiled model computes something else than the model.

    Attributes:
        stage: what makes the difference: "captured program", "passes" or "emitted code".
    """

    def __init__(self, model: str, difference: str, stage: str) -> None:
        super().__init__(
            f"{model} and its {stage} differ: {difference} (torch {torch.__version__}; report it with the model's "
            "forward, and leave memopt out until it is mended)"
        )
        self.stage = stage


def verified(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    call: Callable[[], Any],
    compiled: Callable[[], int],
    stages: Callable[[], Sequence[tuple[str, Callable[..., Any]]]],
    draws_alike: bool,
    many_sizes: Callable[[], bool] = bool,
) -> Any:
    """Run a compiled call; where it compiled anything, beside the model itself.

    Args:
        model: as the user gave it.
        args, kwargs: of the call.
        call: runs what is compiled of it.
        compiled: how many graphs were compiled so far.
        stages: for a difference, or random numbers that code draws otherwise: calls of the model with less than all
            that is done to it, each under its name, the least first.
        draws_alike: whether the engine draws the random numbers that the model draws.
        many_sizes: whether the latest call ran code for many sizes. That is saved for by torch's own partitioner, which
            keeps products with weights where eager keeps these: writes through `.data` in between show, as they do in
            torch.compile's code, and nothing is written to see that.

    Returns:
        The call's outputs.

    Raises:
        ModelError: the compiled call does something else than the model.
    """
    before, count, name = BeforeCall(model, args, kwargs), compiled(), type(model).__name__
    outputs = call()
    if compiled() == count:
        return outputs
    held = [outputs]
    del outputs  # what a call holds counts in the next one
    found = outcome_of(before, held.pop)
    sides = Sides(before, draws_alike)

    def refuse(difference: str | None, at: Callable[[Callable[[], Any]], str | None], when: str = "") -> None:
        """Raise of a difference, or of one that a stage shows: the first that does is named."""
        for stage, run in stages():
            with dead_draws_kept():  # what is compiled within draws the numbers that the model draws
                other = at(functools.partial(run, *args, **kwargs))
            if other is not None:
                before.restore()
                raise ModelError(name, when + other, stage)
        before.restore()
        if difference is not None:
            raise ModelError(name, when + difference, "emitted code")

    difference = sides.difference(found, alike=False)
    if difference is not None or (sides.draws and not draws_alike):
        refuse(difference, lambda run: sides.difference(sides.run(run), alike=True))
    for what, between in () if many_sizes() else writes_between(before, sides.expected):
        with_writes = functools.partial(sides.difference_with, between=between)
        difference = with_writes(call)
        # What differs by capture alone is no fault of a plan: eager runs the user's checkpoints on what was written.
        if difference is not None and with_writes(functools.partial(stages()[0][1], *args, **kwargs)) is None:
            refuse(difference, with_writes, f"if a loop writes {what} between forward and backward, ")
    before.restore()
    return call()
