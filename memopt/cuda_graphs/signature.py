"""What is at the ends of a step's forward and backward graph, which are captured one after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence


@dataclasses.dataclass(frozen=True)
class StepSignature:
    """What is at the ends of a step's forward and backward graph.

    Attributes:
        fixed: positions of forward's arguments that are read where they lie: parameters and buffers.
        results: how many leading results of forward are the caller's; those behind them are saved.
        saved: how many leading arguments of backward are those; those behind them are tangents.
        gradient_of: for results of backward, the position of the parameter among forward's arguments; -1 for others.
    """

    fixed: frozenset[int]
    results: int
    saved: int
    gradient_of: tuple[int, ...] = ()


def signature_of(
    inputs: Sequence[str],
    outputs: Sequence[str | None],
    given: Sequence[str],
    fixed: Collection[str],
    gradient_of: Sequence[str | None] = (),
) -> StepSignature | None:
    """The ends of both graphs, by names of values; None where backward takes what forward does not pass on last.

    Args:
        inputs: forward's arguments.
        outputs: forward's results.
        given: backward's arguments.
        fixed: names of parameters and buffers among forward's arguments.
        gradient_of: whose gradients backward's results are.
    """
    passed = set(outputs)
    saved = next((index for index, name in enumerate(given) if name not in passed), len(given))
    first = len(outputs) - saved
    if list(outputs[first:]) != list(given[:saved]):
        return None
    places = {name: index for index, name in enumerate(inputs) if name in fixed}
    of = tuple(-1 if name is None else places.get(name, -1) for name in gradient_of)
    return StepSignature(frozenset(places.values()), first, saved, of)
