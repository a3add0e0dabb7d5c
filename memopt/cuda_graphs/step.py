"""Both graphs of a training step as CUDA graphs: one launch each, where the device would wait for the host.

A CUDA graph runs the generated code's own kernels in their order, on the addresses that it was captured with. What
forward or backward is given is copied to where its CUDA graph reads it, which is free for others once it has been read
for the last time; parameters and buffers are read where they lie. Forward's large results and gradients lie there until
the next step (see `memopt.cuda_graphs.aliases`), small results are copied out: losses, which loops keep.
What is saved for backward stays where it is: autograd holds it between forward and backward.

Whatever is not as it was when both were captured runs as the generated code does: a weight that lies elsewhere, a
second forward before the first one's backward, a backward that keeps its graph.

Forward's CUDA graph may begin before the call is known to be one for it (see `memopt.cuda_graphs.speculative`): what it
changes is memory that nobody needs then, the random numbers that come next, and what it writes to of the model,
statistics of batch norms say. Numbers and statistics are put back where the call is another one; so it does not begin
where much is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memopt.cuda_graphs.aliases import AliasedOutputs, address_of, seen, view
from memopt.cuda_graphs.copies import copies_of, copy, lying_as, unheld
from memopt.cuda_graphs.pool import GraphPool
from memopt.cuda_graphs.results import aliased_places, with_versions_of
from memopt.cuda_graphs.rollback import Rollback, can_be_put_back
from memopt.cuda_graphs.signature import StepSignature
from memopt.cuda_graphs.speculative import meet
from memopt.errors import first_line
from memopt.memory.places import places_of, same_places
from memopt.torch_compat.backward import keeps_graph
from memopt.torch_compat.storages import storage_id

Call = Callable[[list[Any]], Sequence[Any]]
# Makes of a list of arguments, which is emptied, one in which some are in memory of their own.
Take = Callable[[list[Any]], list[Any]]


class NotCapturable(RuntimeError):
    """A graph cannot be captured; the message says why."""


class SteeredCode(Protocol):
    """What steers the allocator while both graphs are captured; see `memopt.cuda_graphs.steered_code`."""

    def steered_forward(self, args: list[Any], take: Take) -> Sequence[Any]:
        """Run forward on what is taken of a list of arguments, which is emptied."""

    def steered_backward(self, args: list[Any]) -> Sequence[Any]:
        """Run backward on a list of arguments, which is emptied.

        Raises:
            RuntimeError: another backward has used up what this one needs.
        """

    def stop(self) -> None:
        """Let go of what is held."""


class CudaGraphStep:
    """Forward and backward of one graph, captured when they are called for the first time after `start`.

    Attributes:
        signature: of both graphs.
        reason: why nothing is captured any more; empty as long as it may be.
    """

    def __init__(
        self,
        forward: Call,
        backward: Call,
        signature: StepSignature,
        pool: GraphPool,
        make_steered: Callable[[], SteeredCode | None] = lambda: None,
    ) -> None:
        """Take the generated code of both graphs; each empties its list of arguments.

        Args:
            forward: returns the caller's results, and what it saves behind them.
            backward: takes what was saved, and tangents.
            signature: which is which.
            pool: where they are captured.
            make_steered: makes what runs the same code for a capture, where it is known how; called when one is due.
        """
        self._forward, self._backward, self.signature, self._pool = forward, backward, signature, pool
        self._make_steered = make_steered
        self._started = self._needed = False
        self.reason = ""
        self._written: list[int] | None = None  # where forward writes to arguments; None: what it does stays
        self._lock = threading.RLock()
        self._begun: list[torch.Tensor] | None = None  # what forward's CUDA graph was begun on
        self._took = False  # whether a call has taken what came of that
        self._drawn: Any = None  # random numbers, until then
        self.forget()

    @functools.cached_property
    def steered(self) -> Any:
        """What runs the same code for a CUDA graph; None where that is not known."""
        return self._make_steered()

    def writes_to(self, written: Collection[int], given: Sequence[Any]) -> bool:
        """Be told which arguments forward writes to; whether its CUDA graph may begin early, as that can be taken back.

        Args:
            written: their positions.
            given: arguments of forward.
        """
        known = self.signature.fixed.issuperset(written) and can_be_put_back([given[index] for index in written])
        self._written = sorted(written) if known else None
        return known

    def start(self, *, needed: bool = False) -> None:
        """Capture both graphs from now on; `needed`: the code has no room as it is."""
        self._started, self._needed = not self.reason, needed
        self._pool.favors()

    @contextlib.contextmanager
    def watching_lines(self, act: Callable[[int], None]) -> Iterator[None]:
        """Within, the code runs as it is on arguments as a CUDA graph's, and tells this of its lines."""
        graphs, steered = (self._forward, self._backward), self.steered
        steered.watch_lines(act)
        self._forward = lambda args: steered.forward_by_lines(args, functools.partial(self._taken, copy))
        self._backward = steered.backward
        try:
            yield
        finally:
            self._forward, self._backward = graphs
            self.steered.watch_lines(None)

    def renew(self) -> None:
        """Let it be captured after all, once `start` is called."""
        self._started, self.reason = False, ""
        self.forget()

    def stop(self, reason: str) -> None:
        """Capture nothing any more, and forget what was captured."""
        self._started, self.reason = False, reason
        self.forget()

    def forget(self) -> None:
        """Forget what was captured; the next step is captured anew."""
        self._take_back()
        steered = vars(self).get("steered")  # not made to be stopped
        if steered is not None:
            steered.stop()
        self._inputs: list[Any] = []  # in the CUDA graphs' memory, seen without holding it, but for what is fixed
        self._kept: list[int] = []  # which of them are read where they lie
        self._copied: list[int] = []  # the others
        self._places: list[int] = []
        self._run_forward: Callable[[], None] | None = None
        self._run_backward: Callable[[], None] | None = None
        self._returned: list[Any] = []  # what forward's CUDA graph leaves, seen without holding its memory
        self._held: list[Any] = []  # the same, holding it, until backward is captured
        self._own: list[int] = []  # which of what is saved lies in the CUDA graphs' memory
        self._own_places: list[int] = []
        self._tangents: list[Any] = []
        self._gradients: list[Any] = []
        self._overwritten = Rollback([])  # by forward, of the model

    # -- forward ---------------------------------------------------------------------------------------------------

    def forward(self, args: list[Any]) -> Sequence[Any]:
        """Run forward on a list of arguments, which is emptied."""
        given = list(args)
        args.clear()
        meet(self, given, self._copied)
        with self._lock:
            if not self._is_begun_on(given):
                if self._pool.busy:
                    return self._forward(given)
                if not self._pool.copy_out():
                    self.stop("its gradients or outputs are held beyond the next step")
                if not self._prepared(given):
                    self._pool.forget_captured()  # the code needs the memory
                    return self._forward(given)
                self._run_on([given[index] for index in self._copied])
            first = self.signature.results
            results = self._returned[:first]
            large = aliased_places(results, self._returned[first:], self._own)
            outputs = AliasedOutputs((self._run_forward, self._run_backward))
            aliased = dict(zip(large, outputs.alias([results[place] for place in large]), strict=True))
            if aliased:
                self._pool.returns(outputs)
            saved, token = self._saved(given, aliased)
            self._pool.begin(token)
            small = copies_of([None if place in aliased else value for place, value in enumerate(results)])
            return [*(aliased.get(place, value) for place, value in enumerate(small)), *saved]

    def _run_on(self, copied: Sequence[Any]) -> None:
        """Run forward's CUDA graph on what it copies."""
        assert self._run_forward is not None
        self._pool.capturer.enter()
        for index, value in zip(self._copied, copied, strict=True):
            if isinstance(value, torch.Tensor):
                self._inputs[index].copy_(value)
        self._run_forward()

    def _prepared(self, given: Sequence[Any]) -> bool:
        """Whether there is a CUDA graph for these arguments, or one was made now."""
        anew = self._run_forward is not None and not self._alike(given)
        if not self._started or not self._pool.claim(self, anew=anew, at_once=self._needed):
            return False
        if self._run_forward is None:
            try:
                self._capture_forward(given)
            except RuntimeError as error:
                self.stop(first_line(error))
        return self._run_forward is not None

    def _capture_forward(self, given: Sequence[Any]) -> None:
        self._kept = [index for index in sorted(self.signature.fixed) if isinstance(given[index], torch.Tensor)]
        self._places = places_of(list(given))
        self._copied = [index for index in range(len(given)) if index not in self.signature.fixed]
        copies: dict[int, StorageWeakRef] = {}  # whose memory is free for results, once it is let go of

        def take(args: list[Any]) -> list[Any]:
            taken = self._taken(self._pool.capturer.blank, args)
            for value in (taken[index] for index in self._copied):
                if isinstance(value, torch.Tensor):
                    copies[storage_id(value)] = seen(value.untyped_storage())
            self._inputs = unheld(taken, {address_of(taken[index]) for index in self._kept})
            return taken

        def code(args: list[Any]) -> Sequence[Any]:
            return self._forward(take(args)) if self.steered is None else self.steered.steered_forward(args, take)

        self._pool.capturer.begin()
        run, results = self._pool.capturer.capture(code, list(given))
        known = {address_of(given[index]) for index in self._kept}
        for value in results[: self.signature.results]:
            if isinstance(value, torch.Tensor) and (address_of(value) in known or storage_id(value) in copies):
                raise NotCapturable("a result of forward shares memory with an input")
        # What waits on the host for backward stays where it is: the CUDA graph writes there each time.
        known |= {address_of(value) for value in results if isinstance(value, torch.Tensor) and value.is_pinned()}
        self._returned = unheld(results, known)
        self._run_forward = run
        # As long as a step's own results are: backward's CUDA graph may not take their memory before it is let go of.
        self._held = list(results)
        saved = self._returned[self.signature.results :]
        self._own = [i for i, v in enumerate(saved) if isinstance(v, torch.Tensor) and address_of(v) not in known]
        self._own_places = [saved[index].data_ptr() for index in self._own]
        self._overwritten = Rollback([self._inputs[index] for index in self._written or ()])
        fixed = {id(self._inputs[index]): index for index in self.signature.fixed}
        for index, value in enumerate(self._returned):  # weights are handed on as they come
            if id(value) in fixed:
                self._returned[index] = _Argument(fixed[id(value)])

    def _taken(self, make: Callable[[torch.Tensor], torch.Tensor], args: list[Any]) -> list[Any]:
        """Arguments of forward, those that are not read where they lie made anew; the list is emptied."""
        fixed = self.signature.fixed
        taken = [
            make(value) if index not in fixed and isinstance(value, torch.Tensor) else value
            for index, value in enumerate(args)
        ]
        args.clear()
        return taken

    def _alike(self, given: Sequence[Any]) -> bool:
        """Whether the arguments are as those that forward was captured with, but for the values of what is copied."""
        # Hundreds are read where they lie, before the device has work.
        return same_places(list(given), self._places, self._kept) and self._may_copy(
            [given[index] for index in self._copied]
        )

    def _may_copy(self, copied: Sequence[Any]) -> bool:
        for index, value in zip(self._copied, copied, strict=True):
            known = self._inputs[index]
            if not isinstance(value, torch.Tensor):
                if value != known:
                    return False
            elif value.shape != known.shape or value.dtype != known.dtype or value.device != known.device:
                return False
        return True

    # -- forward before it is called -------------------------------------------------------------------------------

    def begin(self, given: Sequence[torch.Tensor]) -> bool:
        """Run forward's CUDA graph on the caller's tensors, of which it takes copies; whether that was done.

        So it is only where all that it reads lies where it lay, and what it writes over is nobody's.
        """
        if self._written is None or self._run_backward is None or not self._lock.acquire(blocking=False):
            return False
        alike = same_places(self._inputs, self._places, self._kept) and len(given) == len(self._copied)
        if not alike or not self._may_copy(given) or not self._pool.is_free_for(self):
            self._lock.release()
            return False
        self._drawn = self._pool.capturer.drawn()
        with torch.no_grad():
            self._pool.capturer.enter()
            self._overwritten.keep()
            self._run_on(given)
        self._begun, self._took = list(given), False
        return True

    def end(self) -> bool:
        """After `begin`: let others in, and take back what no call has taken; whether one has."""
        self._take_back()
        self._lock.release()
        return self._took

    def _take_back(self) -> None:
        if self._begun is not None:
            self._begun = None
            self._pool.capturer.enter()
            self._overwritten.put_back()
            self._pool.capturer.draw_from(self._drawn)

    def _is_begun_on(self, given: Sequence[Any]) -> bool:
        """Whether what was begun is what a call with these arguments needs; it is taken back where not."""
        if self._begun is None:
            return False
        same = all(given[index] is value for index, value in zip(self._copied, self._begun, strict=True))
        if not same or not self._alike(given):
            self._take_back()
            return False
        self._begun, self._took = None, True
        return True

    def _saved(self, given: Sequence[Any], large: Mapping[int, torch.Tensor]) -> tuple[list[Any], torch.Tensor | None]:
        """What is handed to autograd beside aliased results; a tensor of it that lives as long as autograd holds it."""
        saved = [
            given[value.index] if isinstance(value, _Argument) else value
            for value in self._returned[self.signature.results :]
        ]
        alone = with_versions_of(large.values(), saved, self._own)
        if not alone:
            return saved, None
        first = alone[0]
        saved[first] = token = view(saved[first].untyped_storage(), saved[first])  # a new object: its end is seen
        return saved, token

    # -- backward --------------------------------------------------------------------------------------------------

    def backward(self, args: list[Any]) -> Sequence[Any]:
        """Run backward on a list of arguments, which is emptied."""
        given = list(args)
        args.clear()
        if not self._is_of_graph(given):
            return self._backward(given)
        if keeps_graph():  # it runs beside what is saved, and leaves that as it is
            return self._backward(given)
        if not self._pool.is_under_way(self):
            raise RuntimeError("what backward needs was used up by the backward of the same step, or of a later one")
        if self._run_backward is None:
            try:
                self._capture_backward(given[self.signature.saved :])
            except RuntimeError as error:
                reason = first_line(error)
                results = self._backward(given)  # forward's CUDA graph keeps what it has saved until then
                self._pool.end()
                self.stop(reason)
                return results
        self._pool.capturer.enter()
        tangents = given[self.signature.saved :]
        for kept, value in zip(self._tangents, tangents, strict=True):
            if isinstance(value, torch.Tensor):
                kept.copy_(value)
        assert self._run_backward is not None
        self._run_backward()
        self._pool.end()
        outputs = AliasedOutputs((self._run_forward, self._run_backward))
        self._pool.returns(outputs)
        return outputs.alias(self._gradients)

    def _is_of_graph(self, given: Sequence[Any]) -> bool:
        """Whether backward was called on what forward's CUDA graph has saved."""
        if self._run_forward is None or not self._own:
            return False
        values = [given[index] for index in self._own]
        return all(isinstance(value, torch.Tensor) for value in values) and self._own_places == [
            value.data_ptr() for value in values
        ]

    def _capture_backward(self, tangents: Sequence[Any]) -> None:
        self._tangents = [copy(value) if isinstance(value, torch.Tensor) else value for value in tangents]
        arguments = [*self._held[self.signature.results :], *self._tangents]
        self._held[self.signature.results :] = ()  # what is saved is free where the code lets go of it
        code = self._backward if self.steered is None else self.steered.steered_backward
        parameters = [self._inputs[index] if index >= 0 else None for index in self.signature.gradient_of]
        captured, results = self._pool.capturer.capture(lambda args: lying_as(code(args), parameters), arguments)
        self._held = []
        self._pool.capturer.end()
        self._gradients = unheld(results, ())
        self._run_backward = captured


@dataclasses.dataclass(frozen=True)
class _Argument:
    """Stands for an argument of forward that it returns as it is."""

    index: int
