"""Bytes that the caller's loop holds around a model's graphs: at most, and in one step."""

from __future__ import annotations

import dataclasses

import torch

from memopt.budget import format_bytes

# Bytes of losses and counts that a loop keeps: below this nothing is planned for.
SCALARS = 256
# The same on a GPU, where each takes a block: what its allocator may lose beside a plan is a thousand times as much.
_BLOCKS_OF_SCALARS = 16 * 512


@dataclasses.dataclass(frozen=True)
class Seen:
    """Bytes that a loop was seen to hold around a model's graphs, at most.

    Attributes:
        between: between forward's end and backward's start, beyond what forward leaves and backward does not end.
        held: when backward begins, beside the gradients that it begins with; as if it were there all the time.
        forward: outputs of earlier steps while forward runs, where they are gone when backward begins.
        known: whether any step was looked at.
        before: all of the process between an optimizer's step and the model's call, where that is over the budget.
        after: the same between backward's end and the optimizer's step.
        more: while the graphs run, beyond all that is counted: what an operator takes and does not tell.
        behind: in backward behind the graphs (of a penalty on the weights), beyond what is resident, where that is more
            than all that is counted.
    """

    between: int = 0
    held: int = 0
    forward: int = 0
    known: bool = False
    before: int = 0
    more: int = 0
    behind: int = 0
    after: int = 0

    @property
    def beside(self) -> int:
        """Bytes that are counted as if they were there all through the step."""
        return self.held + self.more

    def joined(self, other: Seen) -> Seen:
        """The most of both."""
        return Seen(
            max(self.between, other.between),
            max(self.held, other.held),
            max(self.forward, other.forward),
            self.known or other.known,
            max(self.before, other.before),
            max(self.more, other.more),
            max(self.behind, other.behind),
            max(self.after, other.after),
        )

    def __str__(self) -> str:
        parts = [
            (self.between, "between the model's call and backward (the loss)"),
            (self.held, "that the loop keeps in backward"),
            (self.forward, "of earlier outputs while the model runs"),
            (self.before, "with all of the process before the model's call (a teacher, the next batch)"),
            (self.after, "with all of the process between backward and the optimizer's step (clipping, metrics)"),
            (self.more, "more than was counted while the model's graphs run"),
            (self.behind, "beside what is resident once backward has left the model (for a penalty on the weights)"),
        ]
        return ", ".join(f"{format_bytes(size, short=True)} {what}" for size, what in parts if size)


@dataclasses.dataclass(frozen=True)
class Loop:
    """What the loop of one step held around the model's graphs, whoever runs those: bytes at the step's moments.

    Attributes:
        forward: outputs of earlier steps while forward runs.
        between: the most between forward's end and backward's start, beyond what forward leaves.
        backward: when backward begins, beyond what forward leaves and the gradients that it begins with; below 0 where
            outputs are gone by then.
        kept: whether its graphs are kept for another backward.
        alone: whether backward begins with gradients of scalars alone.
    """

    forward: int
    between: int
    backward: int
    kept: bool
    alone: bool = False


def worth(size: int, device: torch.device) -> int:
    """The bytes that a loop keeps on a device, or 0 where they are too few to plan for."""
    return size if size > (SCALARS if device.type == "cpu" else _BLOCKS_OF_SCALARS) else 0
