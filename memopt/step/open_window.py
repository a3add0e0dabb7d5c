"""What is looked at between one call's end and its backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from memopt.memory.reach import storages_of
from memopt.memory.resident import storage_bytes
from memopt.memory.window import Held, Window
from memopt.torch_compat.cuda_memory import holds_its_memory
from memopt.torch_compat.storages import id_of_storage

# A window that is open since before a call, and what is called with what it has seen of the whole.
Watch = tuple[Window | None, Callable[[Held], None] | None]


class Ended(NamedTuple):
    """A call that has returned.

    Attributes:
        key: tells its graphs apart.
        device: where it ran.
        early: bytes of gradients of outputs that are counted beside backward already.
        gradients: those of the parameters that there are now.
        window: on the allocator, if it is open since before the call.
        whole: called with what that has seen once backward is over, bytes beyond the call's beginning.
        lets_go: whether it is planned for a loop that lets go of its outputs before backward: those are not counted.
        kept: bytes by which its backward takes more where the graph is kept for another one.
        number: which call of its step it is, counted from 1.
        last: whether no further one is expected of its step.
        let_go: bytes that its step's calls have let go of, and hold again from their backward on.
    """

    key: str
    device: torch.device
    early: int
    gradients: Callable[[], Sequence[torch.Tensor]]
    window: Window | None = None
    whole: Callable[[Held], None] | None = None
    lets_go: bool = False
    kept: Callable[[], int] = int
    number: int = 1
    last: bool = True
    let_go: int = 0


class OpenWindow:
    """A window between a call's end and its backward.

    Attributes:
        window: on the allocator.
        call: whose end it was.
        look: called once more is known.
        left: bytes that earlier calls of the step have left.
        gradients: bytes of those that backward begins with.
        another: of other backwards through a graph that was kept the same, and the parameters' gradients there then.
        task: which backward that was.
        hooks: of the call's graph: they live as long as that.
        stays: bytes that are there all through backward, beside what the window sees.
        more: of these, those by which a backward that keeps its graph takes more.
        retains: of these, the outputs' gradients that stay.
        kept: bytes of all that is there all through backward, once it is closed.
        made: storages of the outputs that the step's calls have made, and their bytes.
        gone: bytes of those of them that were gone when backward began: the window sees them go.
        saved: bytes of those that were there then and no tensor of them was, and go in backward: the plan has saved
            them, where eager lets go.
        others: whether models that share the budget were called meanwhile.
        keeps: whether backward keeps its graph for another one.
        alone: whether backward begins with gradients of scalars alone.
    """

    def __init__(
        self,
        window: Window,
        call: Ended,
        outputs: Iterable[torch.Tensor],
        made: Iterable[torch.UntypedStorage],
        look: Callable[[], None],
        left: int,
    ) -> None:
        """A window, open."""
        self.window, self.call, self.look, self.left = window, call, look, left
        self.gradients = self.stays = self.kept = self.gone = self.more = self.retains = self.saved = 0
        self.another: list[tuple[int, int]] = []
        self._latest: object = None  # of other backwards
        self.held_by_others: list[tuple[weakref.ref[torch.UntypedStorage], int]] = []
        # Of what lies in a CUDA graph's memory, none is free when it is gone.
        self.made = [(weakref.ref(storage), storage.nbytes()) for storage in made if holds_its_memory(storage)]
        self.task: object = None
        self.hooks: list[weakref.ref[object]] = []
        self.others = self.keeps = self.alone = False
        self._outputs = [weakref.ref(output) for output in outputs]
        self._reported = False

    @property
    def awaited(self) -> bool:
        """Whether a backward may come."""
        return any(hook() is not None for hook in self.hooks)

    def over(self) -> None:
        """Backward is over."""
        self.saved = sum(size for storage, size in self.held_by_others if storage() is None)
        self.window.backward_ends()
        held = self.window.close()
        if held is not None:
            self.report_whole(held)

    def another_begins(self, task: object, gradients: int) -> None:
        """Another backward has reached the graph, with so many bytes of gradients; a call may have several nodes."""
        if task != self._latest and self.window.another_begins():
            self.another.append((gradients, storage_bytes(self.call.gradients())))
        self._latest = task

    def more_again(self, held: Held) -> int:
        """Bytes, but for gradients, that the loop holds beside another backward at most, and not beside the first."""
        pairs = zip(held.again, self.another, strict=False)  # on CUDA, and where it was closed before, none are seen
        first = self.gradients - self.call.early - self.call.let_go
        return max([0, *(more + first - sum(counted) for more, counted in pairs)])

    def report_whole(self, held: Held) -> None:
        """Say what the whole step has held, where that was asked for and is known, once."""
        if self.call.whole is not None and held.whole is not None and not self._reported:
            self._reported = True
            self.call.whole(held)

    def retained(self) -> int:
        """Bytes of the outputs' gradients that stay, those of `retain_grad`, and are not made yet."""
        leaves = [leaf for leaf in self._held() if leaf.retains_grad and leaf.grad is None]
        return sum(leaf.numel() * leaf.element_size() for leaf in leaves)

    def without_tensors(self) -> list[tuple[weakref.ref[torch.UntypedStorage], int]]:
        """The storages of outputs, and their bytes, that are there though none of these outputs is."""
        held = storages_of(self._held())
        there = [(item, storage) for item in self.made if (storage := item[0]()) is not None]
        return [item for item, storage in there if id_of_storage(storage) not in held]

    def _held(self) -> list[torch.Tensor]:
        return [leaf for reference in self._outputs if (leaf := reference()) is not None]
