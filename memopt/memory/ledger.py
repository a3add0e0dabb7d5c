"""Counts the bytes that operators make on one device, storage by storage, whether the tensors are real or fake."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from memopt.graph.result_memory import taken_beside
from memopt.memory.reach import plain_tensors
from memopt.memory.rounding import allocated_bytes
from memopt.torch_compat import pytree
from memopt.torch_compat.boxed import boxed
from memopt.torch_compat.cuda_memory import holds_its_memory
from memopt.torch_compat.dispatch import TorchDispatchMode
from memopt.torch_compat.storages import id_of_storage


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the storages that operators make on one device, until each is released.

    Attributes:
        live: bytes alive now.
        peak: the most bytes alive at once; set it to `live` to begin anew.
        beside: the most bytes that were alive when a pause began.
        counting: whether storages that appear now are counted; else they are only remembered.
    """

    def __init__(self, device: torch.device) -> None:
        """Nothing is counted yet.

        Args:
            device: the only one whose storages are counted.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.live = 0
        self.peak = 0
        self.counting = True
        self.beside = 0
        self.references: dict[int, weakref.ref[Any]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Dynamo compiles within this mode, and what it makes meanwhile is not seen."""
        return True

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Do not count what is made meanwhile, beside what is there by now."""
        self.beside = max(self.beside, self.live)
        with self.ignoring():
            yield

    @contextlib.contextmanager
    def ignoring(self) -> Iterator[None]:
        """Do not count what is made meanwhile."""
        before, self.counting = self.counting, False
        try:
            yield
        finally:
            self.counting = before

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operator, and enter the storages of its results."""
        for leaf in pytree.tree_leaves((args, kwargs)):
            self.enter(leaf, counted=False)
        result = func(*args, **(kwargs or {}))
        kept, passing = taken_beside(func, args, result)
        for leaf in pytree.tree_leaves(result):
            self.enter(leaf, counted=self.counting, more=kept)
        if passing and self.counting:
            self.peak = max(self.peak, self.live + passing)
        return result

    def enter(self, leaf: Any, *, counted: bool, more: int = 0) -> None:
        """Enter the storage of a tensor unless it is known; one that is not counted is only remembered.

        Args:
            leaf: anything; what is no tensor of the device is passed over.
            counted: whether its bytes count.
            more: bytes that it takes beyond those that are seen.
        """
        for plain in plain_tensors(leaf) if isinstance(leaf, torch.Tensor) else ():
            if plain.device == self.device:
                self._enter(plain, counted, more)

    def _enter(self, plain: torch.Tensor, counted: bool, more: int) -> None:
        storage = plain.untyped_storage()
        key = id_of_storage(storage)
        if key in self.references:
            return
        counted = counted and holds_its_memory(storage)
        size = allocated_bytes(storage.nbytes() + more, self.device) if counted else 0

        self.references[key] = weakref.ref(storage, lambda _: self.released(key, size))
        self.live += size
        self.peak = max(self.peak, self.live)
        self.entered(key, size, plain)

    def entered(self, key: int, size: int, plain: torch.Tensor) -> None:
        """A storage is new: its number, the bytes that are counted of it, and the tensor that showed it."""

    def released(self, key: int, size: int) -> None:
        """A storage has gone that was entered under this number, with so many bytes."""
        self.live -= size
        del self.references[key]


@contextlib.contextmanager
def within_graph(ledger: Ledger | None) -> Iterator[None]:
    """Within: a captured graph runs, whose memory is planned and not the ledger's."""
    with contextlib.nullcontext() if ledger is None else ledger.pause():
        yield


def apart(run: Callable[..., Any], ledger: Callable[[], Ledger | None]) -> Callable[..., Any]:
    """Forward or backward of a captured graph, which the ledger of a rehearsal leaves out."""

    def graph(*args: Any) -> Any:
        with within_graph(ledger()):
            return run(*args)

    return boxed(graph)
