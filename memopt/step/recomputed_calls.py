"""A call of compiled code that may let go of what it saved, and recomputes that as its backward begins.

How many calls a step has is not known before they come: the first one is planned as if it were alone, and holds what a
later one of the same step needs. What it saved is dropped then. Its backward finds arguments, random numbers and
buffers as they were, runs forward again, and reads what that saves.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from memopt.capture.overlap import same_elements
from memopt.common.kernel_settings import kernel_settings, set_kernel_settings
from memopt.common.random_streams import RandomStreams
from memopt.step.backward_entry import Stamp
from memopt.torch_compat.backward import keeps_graph
from memopt.torch_compat.saved_tensors import hooks_allowed, hooks_in_force
from memopt.torch_compat.storages import storage_id, version_of
from memopt.torch_compat.tracing_context import in_trace

_NOTHING: tuple[torch.Tensor | None, int] = None, 0
_MOST_COPIED = 2**20  # bytes of what a call writes to and is copied before: counts and averages, no tables

# Calls of a compilation that are listed; they take some microseconds more for each tensor that is saved.
_FIRST_CALLS = 8


class RecomputedCall:
    """One call of a compiled graph, until its backward has run.

    Attributes:
        kept_bytes: what stays beside the call's arguments where its saved tensors are dropped: its outputs.
        returned_bytes: of what it saved, bytes that its outputs hold as well.
        dropped: whether they were.
        before: called before the call is recomputed; raises where there is no room for that.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        args: Sequence[Any],
        written: Collection[int],
        name: str,
        called: Callable[[int], str],
    ) -> None:
        """Remember what a call begins with.

        Args:
            run: the compiled graph.
            args: its arguments.
            written: positions of those that it writes to.
            name: of the model, for errors.
            called: what a user calls an argument, by its position.
        """
        self._run, self._name = run, name
        self._args = [value.detach() if isinstance(value, torch.Tensor) else value for value in args]
        self._wanted = [isinstance(value, torch.Tensor) and value.requires_grad for value in args]
        self._copies = {place: _Copy(args[place]) for place in written}
        self._stamps = {
            place: Stamp(value, called(place), contents=False)
            for place, value in enumerate(self._args)
            if isinstance(value, torch.Tensor) and place not in self._copies
        }
        pairs = enumerate(zip(args, self._wanted, strict=True))
        self._parameters = {
            place for place, (value, wanted) in pairs if wanted or isinstance(value, torch.nn.Parameter)
        }
        self._devices = sorted({v.device.index for v in args if isinstance(v, torch.Tensor) and v.is_cuda})
        self._drawn, self._settings = RandomStreams(self._devices), kernel_settings()
        self._saved: list[tuple[torch.Tensor | None, int]] = []  # each with its count of writes
        self._leaves: dict[int, torch.Tensor] = {}  # the arguments among it that are read as they are then, as in eager
        self.kept_bytes = self.returned_bytes = 0
        self.dropped = False
        self.before: Callable[[], None] = _nothing

    def forward(self, args: Sequence[Any]) -> Any:
        """Run it.

        Args:
            args: those that it was made with.
        """
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            results = self._run(*args)
        given = {memory: place for place, value in enumerate(self._args) if (memory := _memory(value))}
        for number, (value, _) in enumerate(self._saved):
            place = given.get(_memory(value) or 0)
            if value is not None and place is not None and args[place].is_leaf and same_elements(args[place], value):
                self._leaves[number] = args[place]
        made = {
            key: size
            for value in results
            if (key := _memory(value)) is not None and key not in given
            for size in [value.untyped_storage().nbytes()]
        }
        saved = {_memory(value) for value, _ in self._saved}
        self.kept_bytes = sum(made.values())
        self.returned_bytes = sum(size for key, size in made.items() if key in saved)
        return results

    @property
    def keeps_all(self) -> bool:
        """Whether what a loop may write to before backward, as backward does not read it, is few bytes to copy."""
        return sum(self._args[place].untyped_storage().nbytes() for place in self._unread()) <= _MOST_COPIED

    def _unread(self) -> list[int]:
        """Positions of inputs and buffers that were not saved: a uint8 image, a mask. Eager lets them be changed."""
        saved = {_memory(value) for value, _ in self._saved}
        return [place for place in self._stamps.keys() - self._parameters if _memory(self._args[place]) not in saved]

    def drop(self) -> None:
        """Let go of what was saved, and keep what may be changed until it is recomputed, where that is little."""
        if self.keeps_all:
            for place in self._unread():
                self._copies[place] = _Copy(self._args[place])
                del self._stamps[place]
        self._saved = [_NOTHING] * len(self._saved)
        self.dropped = True

    def _pack(self, value: torch.Tensor) -> int:
        # Detached, as it may be an output: autograd's node would hold itself. The count of writes is the same.
        self._saved.append((value.detach(), version_of(value)))
        return len(self._saved) - 1

    def _unpack(self, place: int) -> torch.Tensor:
        if self.dropped:
            self._recompute()
        value, version = self._saved[place]
        if value is None:
            raise RuntimeError(
                f"backward of {self._name} has run, and what it saved is gone: retain_graph=True keeps it"
            )
        if version_of(value) != version:  # autograd itself does not ask where hooks are
            raise RuntimeError(
                f"what {self._name} has saved for backward, an output or an argument, was changed before backward: "
                "change it after backward(), or call the original model in such a step"
            )
        value = self._leaves[place].detach() if place in self._leaves else value
        if not keeps_graph():
            self._saved[place] = _NOTHING
        return value

    def _recompute(self) -> None:
        """Run forward again.

        Raises:
            RuntimeError: what it reads was changed since, or it saves other things.
        """
        self.before()
        with torch.no_grad():
            for stamp in self._stamps.values():
                stamp.check()
        found: list[tuple[torch.Tensor | None, int]] = []
        args = [
            self._copies[place].made() if place in self._copies else _leaf(value, wanted)
            for place, (value, wanted) in enumerate(zip(self._args, self._wanted, strict=True))
        ]

        def keep(value: torch.Tensor) -> None:
            found.append((value.detach(), version_of(value)))

        now, settings = RandomStreams(self._devices), kernel_settings()
        try:
            self._drawn.restore()
            set_kernel_settings(self._settings)
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, _gone):
                self._run(*args)
        finally:
            set_kernel_settings(settings)
            now.restore()
        if len(found) != len(self._saved):
            raise RuntimeError(f"{self._name} saves other tensors where it is recomputed: call the original model")
        self._saved, self.dropped = found, False


class FirstCalls:
    """The first calls of a compilation, of which it is not known yet how many a step has.

    Attributes:
        listed: those that the present call has made.
    """

    def __init__(self) -> None:
        """None was made yet."""
        self.listed: list[weakref.ref[RecomputedCall]] = []
        self._left = _FIRST_CALLS

    def begin(self) -> None:
        """Another call of the model begins."""
        self.listed = []

    def to_be_listed(self) -> list[weakref.ref[RecomputedCall]] | None:
        """Where a call is to be listed that is about to run and can be recomputed; None where it need not be."""
        if not self._left or hooks_in_force():
            return None
        self._left -= 1
        return self.listed


def recomputable(
    run: Callable[..., Any],
    written: Collection[int],
    name: str,
    ran: Callable[[], list[weakref.ref[RecomputedCall]] | None],
    called: Callable[[int], str] = str,
) -> Callable[..., Any]:
    """A compiled graph whose calls can be recomputed.

    Args:
        run: the graph.
        written: positions of the arguments that it writes to.
        name: of the model, for errors.
        ran: where a call is to be listed that is about to run; None if it need not be recomputed.
        called: what a user calls an argument, by its position.
    """

    def call(*args: Any) -> Any:
        if not torch.is_grad_enabled() or in_trace() or not hooks_allowed():
            return run(*args)
        listed = ran()
        if listed is None:
            return run(*args)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():  # no state can be read there
            return run(*args)
        if sum(args[place].untyped_storage().nbytes() for place in written) > _MOST_COPIED:
            return run(*args)
        made = RecomputedCall(run, args, written, name, called)
        listed.append(weakref.ref(made))
        return made.forward(args)

    return call


class _Copy:
    """What a tensor holds, in memory that is no part of a budget."""

    def __init__(self, value: torch.Tensor) -> None:
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        self._bytes = bytearray(flat.numpy().tobytes())
        self._like = value.detach()

    def made(self) -> torch.Tensor:
        """A new tensor that holds it."""
        made = torch.empty_like(self._like)
        if self._bytes:
            flat = torch.frombuffer(self._bytes, dtype=torch.uint8).view(made.dtype)
            made.copy_(flat.reshape(made.shape))
        return made


def _leaf(value: Any, wanted: bool) -> Any:
    return value.detach().requires_grad_(wanted) if isinstance(value, torch.Tensor) else value


def _memory(value: Any) -> int | None:
    with contextlib.suppress(RuntimeError, NotImplementedError):  # a layout without storage
        return storage_id(value) if isinstance(value, torch.Tensor) else None
    return None


def _gone(_: Any) -> torch.Tensor:
    raise RuntimeError("a graph that only recomputes has no backward")


def _nothing() -> None:
    return None
