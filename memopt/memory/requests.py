"""What a step asks CUDA's allocator for, line by line, from the allocator's own history."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from memopt.memory.allocator import index_of
from memopt.solve.placement import Block
from memopt.torch_compat.cuda_memory import history, keeps_history

# A request of so many bytes stands for the beginning of a line.
_MARK = 7
# Entries of a history.
_MOST = 1_000_000


class Requests:
    """Notes a step's requests.

    Attributes:
        blocks: what was noted, in order; None until a whole step was.
    """

    def __init__(self, device: torch.device) -> None:
        """Take a CUDA device."""
        self._device = device
        self._lines: list[int] = []
        self.blocks: list[Block] | None = None

    def before(self, line: int) -> None:
        """Note that a line begins."""
        mark = torch.cuda.caching_allocator_alloc(_MARK, index_of(self._device))
        torch.cuda.caching_allocator_delete(mark)  # type: ignore[no-untyped-call]
        self._lines.append(line)

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note what is asked for within; nothing where a history is being kept already.

        The allocator must have given something out before: torch crashes otherwise.
        """
        if keeps_history():
            yield
            return
        with history(_MOST) as requests:
            yield
            self.blocks = blocks_of(requests(index_of(self._device)), self._lines)


def blocks_of(trace: Sequence[Mapping[str, Any]], lines: Sequence[int]) -> list[Block] | None:
    """The blocks that were asked for within lines; None where the history does not show the lines.

    What is asked for before the first line, and what was there before, is left out. What is not let go of dies with the
    last line.

    Args:
        trace: events of the allocator in order, each with its `action`, `addr` and `size` in bytes.
        lines: numbers of the lines that began, one for each mark among the events.
    """
    begun = -1
    open_: dict[int, tuple[int, int, int]] = {}
    found: list[tuple[int, Block]] = []  # by order
    order = 0
    for event in trace:
        address, size = event["addr"], event["size"]
        if event["action"] == "alloc" and size == _MARK:
            begun += 1
            if begun >= len(lines):
                return None
        elif event["action"] == "alloc" and begun >= 0:
            open_[address] = order, size, lines[begun]
            order += 1
        elif event["action"] == "free_completed" and address in open_:
            number, size, born = open_.pop(address)
            found.append((number, Block(size, born, lines[begun], order if born == lines[begun] else -1)))
    if begun != len(lines) - 1:
        return None
    found += [(number, Block(size, born, lines[-1])) for number, size, born in open_.values()]
    return [block for _, block in sorted(found, key=lambda item: item[0])]
