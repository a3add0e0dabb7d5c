"""Guards a model's steps: the limit is in force in forward, in backward, in the optimizer's step, and nowhere else."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from memopt.budget import format_bytes
from memopt.common.garbage import collect_all
from memopt.errors import ShortOfMemoryError
from memopt.memory.allocator import allocated_after_gc, page_bytes, pooled_bytes, segments_expand, slack_bytes
from memopt.memory.allocator_limit import Allowance, Held, enter, grow, held_now, leave
from memopt.memory.distributed import buckets_of, gathered_bytes
from memopt.memory.reach import optimizers_in
from memopt.memory.resident import Resident, storage_bytes
from memopt.report.record import Report
from memopt.torch_compat import pytree
from memopt.torch_compat.autograd_nodes import at_end_of_backward
from memopt.torch_compat.boxed import boxed

# A limit that was raised by limit / _NEWS more than was said is news.
_NEWS = 256


class StepGuard:
    """The limit of one model's steps."""

    def __init__(self) -> None:
        """Without an allowance nothing is limited."""
        self.allowance: Allowance | None = None
        self._token: tuple[int, int] | None = None
        self._limit = 0  # of the latest step
        self._inside = False
        self._watched: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._stepping: _UntilEnd | None = None
        self._held: Held | None = None  # when the latest step began
        self._told = 0  # bytes by which a step's limit was raised, as was said

    @contextlib.contextmanager
    def forward(self, beyond: int | None = None) -> Iterator[None]:
        """In force until the model's forward returns, from when the allowance is known.

        Args:
            beyond: bytes that the allocator was seen to hold in a step beyond what is there when it begins.
        """
        self._inside, self._stepping = True, None  # a step of the optimizer that failed calls nothing back
        try:
            allowance, held = self.allowance, self._begin()
            if beyond is not None and allowance is not None and held is not None:
                size = min(self._limit, allowance.expected(held, beyond))
                pieces = held.handed_back_since(self._held)
                # Graphs that others captured may go on using the buffers that libraries had then.
                if grow(allowance.device, size, held, anew=not allowance.pooled_bytes, in_pieces=pieces):
                    held = held._replace(reserved_bytes=size)
            self._held = held
            yield
        finally:
            self._inside = False
            self._end()

    def allow(self, allowance: Allowance) -> None:
        """Set what the steps may hold, or more than before; in the middle of forward, from now on."""
        known = 0 if self.allowance is None else self.allowance.limit_bytes
        self.allowance = dataclasses.replace(allowance, limit_bytes=max(known, allowance.limit_bytes))
        if self._inside:
            self._end()
            self._begin()

    def lowers(self, limit_bytes: int) -> None:
        """Later steps may hold no more than this: a fraction is of less than was supposed before a step was seen."""
        if self.allowance is not None and limit_bytes < self.allowance.limit_bytes:
            self.allowance = dataclasses.replace(self.allowance, limit_bytes=limit_bytes)

    def newly_raised(self) -> int:
        """Bytes by which the latest step may hold more than the limit, where that is news; 0 where it is not.

        What came to lie on the device since the step was planned, and was not counted, comes on top of it.
        """
        if self.allowance is None:
            return 0
        raised = self._limit - self.allowance.limit_bytes - self.allowance.beyond_bytes
        if raised <= self._told + self.allowance.limit_bytes // _NEWS:
            return 0
        self._told = raised
        return raised

    def during(self, optimizer: Any) -> None:
        """Be in force during the optimizer's steps as well, or those that it wraps, as long as the guard lives."""
        guard = weakref.ref(self)
        for item in optimizers_in(optimizer):
            if "_optimizer_step_pre_hooks" in vars(item):  # a wrapper need not be made as an optimizer is
                if item not in self._watched:
                    self._watched.add(item)
                    item.register_step_pre_hook(functools.partial(_around_step, guard, True))
                    item.register_step_post_hook(functools.partial(_around_step, guard, False))
                return

    def backward(self, outputs: Any) -> None:
        """Be in force again from when backward reaches the model's outputs until backward ends."""
        if self.allowance is None:
            return
        enters = functools.partial(_in_backward, self.allowance.device, self._limit)
        for leaf in pytree.tree_leaves(outputs):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(enters)  # type: ignore[no-untyped-call]
                return

    def _begin(self) -> Held | None:
        """Be in force, where the allowance is known; what the allocator holds then."""
        if self.allowance is None:
            return None
        held = held_now(self.allowance.device)
        self._limit = self.allowance.limit(held)
        self._token = enter(self.allowance.device, self._limit)
        return held

    def _end(self) -> None:
        if self._token is not None:
            leave(self._token)
            self._token = None


def _around_step(guard: weakref.ref[StepGuard], begins: bool, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return
    held = guard()
    if held is not None and held.allowance is not None and held._limit:
        held._stepping = _UntilEnd(enter(held.allowance.device, held._limit)) if begins else None


def _in_backward(device: torch.device, limit_bytes: int, gradient: torch.Tensor) -> None:
    at_end_of_backward(_UntilEnd(enter(device, limit_bytes)).end)


class _UntilEnd:
    """A limit in force until `end`, or until autograd drops it: a backward that fails calls nothing back."""

    def __init__(self, token: tuple[int, int]) -> None:
        self._leave = weakref.finalize(self, leave, token)
        self._leave.atexit = False

    def end(self) -> None:
        self._leave()


def allowance_of(
    model: nn.Module,
    state: int,
    resident: Resident,
    limit_bytes: int,
    before: Allowance | None,
    *,
    whole: bool,
    tried: bool,
    give_back: Callable[[], None],
) -> Allowance:
    """What a model's steps may make the allocator of its CUDA device hold.

    Args:
        model: whose tensors there are counted.
        state: bytes of its optimizers' state there.
        resident: what lies there besides tensors that only a step has.
        limit_bytes: the budget.
        before: what was known of an earlier step; graphs that others have captured since are not looked for anew.
        whole: whether the budget is of all that the process holds.
        tried: whether trial steps show what the allocator takes, so that it does so in one piece.
        give_back: gives back what the model's own functions hold between calls: it is nobody else's.
    """
    device = resident.device
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters]
    here = storage_bytes([*parameters, *model.buffers(), *gradients]) + buckets_of(model).nbytes
    here += gathered_bytes(model)  # planned in the midst of a call, where some of it is there
    own = here + state + resident.inputs + resident.libraries + resident.others
    coming = max(0, resident.optimizer_state - state)
    allocated = torch.cuda.memory_allocated(device)
    if allocated > own - resident.libraries:  # others' tensors, or what planning has left and a step will not find
        allocated = allocated_after_gc(device)
        own, coming = own - resident.libraries, coming + resident.libraries  # given back, and they come again
    if before is None:
        give_back()
    pooled = pooled_bytes(device) if before is None else before.pooled_bytes
    spare = slack_bytes(limit_bytes, device) if whole else 0
    if allocated > own + spare:  # it would come on top of the budget
        give_back()
        collect_all()
        allocated = allocated_after_gc(device)
    page = page_bytes() if segments_expand() and not tried else 0
    return Allowance(device, limit_bytes, allocated, own, coming, pooled, spare, page)


# -- memory that runs out ---------------------------------------------------------------------------------------------


def short_of_memory(report: Report | None, error: torch.OutOfMemoryError) -> str:
    """One line that says what ran out, what was promised, and what would help."""
    reason = str(error).splitlines()[0].split(". GPU")[0] if str(error) else "out of memory"
    free = re.search(r"of which (\S+ \w+) is free", str(error))  # where it is much, the budget is what was short
    reason += f", {free[1]} free on the device" if free else ""
    if report is None:
        return f"memory ran out before the step was planned ({reason}): free memory on the device"
    budget, peak = report.budget_bytes, format_bytes(report.peak_bytes, short=True)
    held = "" if budget is None else f" inside the budget of {format_bytes(budget, short=True)}"
    return f"memory ran out in a step planned to take {peak}{held} ({reason}): free other memory or allow more"


def said(
    run: Callable[[list[Any]], Sequence[Any]], say: Callable[[torch.OutOfMemoryError], str]
) -> Callable[[list[Any]], Sequence[Any]]:
    """A compiled backward that raises MemoryError with one line when memory runs out in it."""

    def backward(args: list[Any]) -> Sequence[Any]:
        try:
            return run(args)
        except torch.OutOfMemoryError as error:
            reason = say(error)
        raise ShortOfMemoryError(reason)  # out here, so that no traceback holds on to the step's tensors

    return boxed(backward)
