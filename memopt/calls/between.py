"""What a loop may write to between forward and backward, to see that gradients are the model's then, too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from memopt.calls.before_call import BeforeCall
from memopt.calls.compared import Outcome
from memopt.calls.outcome import Between
from memopt.capture.facts import Facts
from memopt.memory.distributed import has_group

_FACTOR = 1.25  # exact in every floating-point type
_MOST = 4  # outputs that are written to


def writes_between(before: BeforeCall, expected: Outcome) -> Iterator[tuple[str, Between]]:
    """What is written, in words, and what writes it.

    Args:
        before: the state that a call begins with.
        expected: what the model's own call does.

    Nothing is written where processes work together: parameters may be shards that are gathered anew in between.
    """
    if has_group() or before.in_history or not any(name.startswith("gradient of ") for name in expected.values):
        return

    def given(_: Sequence[torch.Tensor]) -> None:
        for tensor in before.unwritten():
            if tensor.is_floating_point() and not tensor.is_inference():
                tensor.data.mul_(_FACTOR)

    # What the call itself writes to is the caller's only in eager: a graph computes with a value of its own.
    yield "through .data to parameters, buffers and arguments", given
    facts = [expected.facts.get(f"output {index}") for index in range(len(expected.facts))]
    tensors = [fact for fact in facts if isinstance(fact, Facts)]
    written = [place for place, fact in enumerate(tensors) if fact.dtype.is_floating_point]
    for place in written[:_MOST]:
        yield f"to output {place}", _writes_to(place)


def _writes_to(place: int) -> Between:
    def write(outputs: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            outputs[place].mul_(_FACTOR)

    return write
