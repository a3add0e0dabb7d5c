"""A real step of compiled code, taken before the caller's own: what the allocator reserves in it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import logging
import re
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from memopt.budget import BudgetError
from memopt.capture.dynamo import Hooks
from memopt.capture.lending import position_of
from memopt.memory.allocator import retries_of, settled_bytes
from memopt.memory.allocator_limit import grow, held_bytes, lifted
from memopt.phases import phase
from memopt.program import OutputKind, Program
from memopt.progress import stage
from memopt.synthesis import same_random_state

if TYPE_CHECKING:
    from memopt.session import Session

log = logging.getLogger("memopt")
_T = TypeVar("_T")

# How often a step is planned for less because of what the allocator reserves.
_ROUNDS = 2
# A step during which memory ran out is planned again for less by one part in so many of the budget.
_SHORT = 16
# Where what was missing is known, by that and by what blocks may lose that lie otherwise the next time: one part in so
# many, by the rounds that are left. More is often less than any plan can do, where the budget is near the least.
_SPREAD = {2: 256, 1: 64}
# One that keeps the budget only where the allocator hands back its cache each time, by one part in so many.
_SLOW = 50
# Seconds for which memory that other processes hold is waited for, and between two looks.
_WAIT, _LOOK = 20.0, 0.5
# How often a step is taken that others left too little memory.
_TRIES = 3
# Steps that are taken: the first one chooses kernels, and takes more for it than later ones. Under the limit some more:
# where blocks lie changes from one step to the next.
_STEPS, _HELD_STEPS = 2, 4


@dataclasses.dataclass(frozen=True)
class Taken:
    """What a step took of the device.

    Attributes:
        allocated_bytes: the most bytes of tensors at any moment, all that is there included.
        reserved_bytes: the most bytes that the allocator held, nothing that was cached before included.
        before_bytes: bytes of tensors when the step began.
        kept_bytes: bytes that the first step left behind: buffers of libraries.
        retries: how often the allocator handed back what it cached, to take other memory, once steps were warm.
    """

    allocated_bytes: int
    reserved_bytes: int
    before_bytes: int
    kept_bytes: int = 0
    retries: int = 0


@dataclasses.dataclass(frozen=True)
class Short:
    """A step during which memory ran out.

    Attributes:
        missing_bytes: what the allocator would have held beyond its limit; 0 where that is not known.
        others: whether other processes held so much that the device had less than the limit.
    """

    missing_bytes: int = 0
    others: bool = False


def mutated(program: Program) -> frozenset[int] | None:
    """Which arguments of a captured graph the step writes to, by position; None where that is not known."""
    places = {node.name: position_of(node) for node in program.placeholders}
    found = {places.get(out.target or "") for out in program.outputs if out.kind is OutputKind.MUTATION}
    return None if None in found else frozenset(place for place in found if place is not None)


def take_step(
    run: Callable[..., Any], given: Sequence[Any], written: Collection[int], device: torch.device, *, held: bool = False
) -> Taken | Short:
    """Run forward and backward of a compiled graph and let go of all that came of it.

    Nothing of the caller's changes: arguments that the step writes to are copies, gradients are returned rather than
    accumulated, and random states are put back.

    Args:
        run: the compiled graph.
        given: its arguments.
        written: positions of the arguments that it writes to.
        device: the CUDA device that is watched.
        held: whether the allocator's limit is in force, and its cache kept from one step to the next, as in the
            caller's own steps. Else the limit is lifted, so that what the allocator would reserve is seen.

    Returns:
        What the last step took, or what it lacked.
    """
    short = Short()
    limit = contextlib.nullcontext() if held else lifted(device)
    with unset_fake_temporarily(), torch._guards.tracing(None), same_random_state(given), limit:
        try:
            first = settled_bytes(device)
            for _ in range(_HELD_STEPS if held else _STEPS):
                torch.cuda.synchronize(device)
                if not held:
                    torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(device)
                before, retried = torch.cuda.memory_allocated(device), retries_of(device)
                _step(run, given, written)
                torch.cuda.synchronize(device)
            peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
            return Taken(*peaks, before, _left(device, first, before), retries_of(device) - retried)
        except (torch.OutOfMemoryError, MemoryError) as error:
            # Its traceback holds the step's tensors until this clause is left.
            short = _lacked(error, device, held)
        finally:
            torch.cuda.empty_cache()
    return short


_ASKED = re.compile(r"Tried to allocate (\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def _lacked(error: Exception, device: torch.device, held: bool) -> Short:
    """What a step lacked, asked while its tensors are still there: what was cached, the allocator has handed back."""
    if device.type != "cuda":
        return Short()
    limit = held_bytes(device) or 0
    if _is_short(device, limit):
        return Short(others=True)
    asked = _ASKED.search(str(error))
    if asked is None or not held or not limit:
        return Short()
    wanted = int(float(asked[1]) * _UNITS[asked[2]])
    return Short(max(0, torch.cuda.memory_reserved(device) + wanted - limit))


def _left(device: torch.device, first: int, second: int) -> int:
    """What the first of two steps left behind and garbage is not, from what was allocated before each."""
    if second <= first:
        return 0
    gc.collect()
    return max(0, min(second, torch.cuda.memory_allocated(device)) - first)


def _step(run: Callable[..., Any], given: Sequence[Any], written: Collection[int]) -> None:
    arguments = [_own(value, index in written) for index, value in enumerate(given)]
    wanted = [value for value in arguments if isinstance(value, torch.Tensor) and value.requires_grad]
    with torch.enable_grad():
        results = run(*arguments)
        made = [value for value in results if isinstance(value, torch.Tensor) and value.requires_grad]
        if made and wanted:
            torch.autograd.grad(made, wanted, [torch.ones_like(value) for value in made], allow_unused=True)


def _own(value: Any, copied: bool) -> Any:
    """A tensor that hooks and gradients of the caller's do not see; what is written to has memory of its own."""
    if not isinstance(value, torch.Tensor):
        return value
    own = value.detach()
    if copied:
        own = own.clone(memory_format=torch.preserve_format)
    return own.requires_grad_(value.requires_grad)


def lower_within(
    session: Session, lower: Callable[[], tuple[Callable[..., Any], Hooks]], given: Sequence[Any]
) -> Callable[..., Any]:
    """Lower one graph, take a step with it, and lower it for less while the allocator reserves more than the budget.

    Where memory runs out in the step of an engine's own code all the same, the graph is lowered operator by operator.

    Args:
        session: whose graph it is.
        lower: compiles the graph under the session's present budget.
        given: the caller's arguments.

    Raises:
        BudgetError: no plan keeps the budget, or none whose step does not run out of memory within it.
    """
    margin = session.margin
    run, hooks = lower()
    for left in reversed(range(_ROUNDS + 1)):
        device = session.resident.device
        written, allowed = _measurable(session, hooks), held_bytes(device)
        if written is None or allowed is None:
            return run
        stage("taking a step")
        with phase("trial steps"):
            taken = _patiently(functools.partial(take_step, run, given, written, device), device, allowed)
        if isinstance(taken, Taken):
            if taken.kept_bytes > session.resident.libraries:
                session.libraries_keep(taken.kept_bytes - session.resident.libraries)
                allowed = held_bytes(device) or allowed
            session.took(taken.allocated_bytes - (allowed - session.limit_bytes))
        coming = session.resident.coming  # what the optimizer's first steps add, within the same limit
        over = taken.reserved_bytes + coming - allowed if isinstance(taken, Taken) else 0
        again = functools.partial(take_step, run, given, written, device, held=True)
        if isinstance(taken, Short):
            held: _Held | Short = taken
        else:
            held = _patiently(functools.partial(_taken_within, again, device, taken, coming), device, allowed)
            if isinstance(held, _Held):
                session.beyond = held.cache_bytes - coming - taken.before_bytes
                if held.full_speed or (over <= 0 and not left):
                    return run
        within = isinstance(held, _Held) and over <= 0
        if isinstance(held, Short):
            near = held.missing_bytes + allowed // _SPREAD.get(left, _SHORT)
            over = max(over, near if held.missing_bytes else allowed // _SHORT)
        elif within:
            over = allowed // _SLOW
        if not left:
            break
        log.info("the allocator holds %d bytes more than the budget in a step: planning again", over)
        known = session.tighten(over + over // 8)
        try:
            run, hooks = lower()
        except BudgetError:
            session.loosen(known)
            if within:
                return run
            break
    if isinstance(held, Short) and (held.others or _is_short(device, held_bytes(device) or 0)):
        session.note("the device had less than the budget, for what others hold: no step was taken within it")
        return run
    # The caller's own step would run out of memory as well.
    if isinstance(held, Short):
        refusal = session.over(session.limit_bytes + over, session.limit_bytes)
        if session.exact or session.code_fails:
            raise refusal
        session.margin, session.code_fails = margin, True  # its operators may take less than code, in another order
        session.forget_plan()
        try:
            return lower_within(session, lower, given)
        except BudgetError as error:
            if error.minimum_bytes <= refusal.minimum_bytes:
                raise
        finally:
            session.code_fails = False
        raise refusal
    session.note("the allocator reserves more than the step needs: it is held to the budget, which takes time")
    return run


@dataclasses.dataclass(frozen=True)
class _Held:
    """How the step runs where the allocator is held to the budget.

    Attributes:
        cache_bytes: what the allocator holds when the step begins, the optimizer's state included.
        full_speed: whether it never has to hand back what it caches.
    """

    cache_bytes: int
    full_speed: bool


def _taken_within(step: Callable[[], Taken | Short], device: torch.device, free: Taken, coming: int) -> _Held | Short:
    """How the step runs under the limit, taken as the caller's will be, or what it lacks.

    Where blocks lie decides whether the next one fits: a step that is let reserve less than the limit may run out of
    memory under it all the same, and one that would reserve more may come to terms with what there is. So the steps
    begin as the caller's will: nothing of an earlier one in the way, and the cache taken in one piece.

    Args:
        step: takes it, held to the limit.
        device: the CUDA device.
        free: what the step took without the limit.
        coming: bytes of the optimizer's state that is not there yet.
    """
    allowed = held_bytes(device) or 0
    if free.allocated_bytes + coming > allowed:
        return Short(free.allocated_bytes + coming - allowed)
    found: _Held | Short = Short()
    for size in dict.fromkeys((min(allowed, free.reserved_bytes + coming), allowed)):
        with phase("trial steps"):
            taken = _beside(coming, size, device, step)
            _begin_anew(device, size)
        if isinstance(taken, Taken) and not taken.retries:
            return _Held(size, True)
        if isinstance(found, Short):
            found = taken if isinstance(taken, Short) else _Held(size, False)
    return found


def _beside(coming: int, size: int, device: torch.device, step: Callable[[], Taken | Short]) -> Taken | Short:
    try:
        state = torch.empty(coming, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        return _lacked(error, device, True)
    _begin_anew(device, size)
    taken = step()
    del state
    return taken


def _begin_anew(device: torch.device, size: int) -> None:
    """Let the allocator hold `size` bytes: what is in use, and the rest in one piece.

    Buffers of libraries would lie between pages that are handed back, and keep parts of them.
    """
    settled_bytes(device)
    torch.cuda.empty_cache()
    grow(device, size)


def _patiently(step: Callable[[], _T | Short], device: torch.device, allowed: int) -> _T | Short:
    """Take a step, and again where other processes held what it lacked and give it back in time."""
    for _ in range(_TRIES):
        taken = step()
        if not isinstance(taken, Short) or not (_given_back(device, allowed) or taken.others):
            break
    return taken


def _given_back(device: torch.device, allowed: int) -> bool:
    """Whether the device was short of what may be held here because of other processes, and now is not.

    Several processes that compile side by side take their steps one after the other: what one of them holds for a
    moment says nothing of another one's plan.
    """
    until = time.monotonic() + _WAIT
    short = False
    while _is_short(device, allowed):
        if time.monotonic() > until:
            return False
        short = True
        time.sleep(_LOOK)
    return short


def _is_short(device: torch.device, allowed: int) -> bool:
    """Whether other processes hold so much that the device has less than may be held here."""
    if device.type != "cuda":
        return False
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) < allowed


def step_decides(session: Session, hooks: Hooks, excess: int) -> bool:
    """Whether code that is `excess` bytes over what the budget leaves to tensors is to be judged by a step.

    So it is where only what the allocator may lose is lacking, and it was not seen to lose so much.
    """
    if session.margin or held_bytes(session.resident.device) is None or _measurable(session, hooks) is None:
        return False
    return excess <= session.limit_bytes - session.usable(session.limit_bytes)


def _measurable(session: Session, hooks: Hooks) -> frozenset[int] | None:
    """What a step of this graph writes to, where one may be taken: the whole step is here, alone and for real."""
    program = hooks.captured
    if program is None or hooks.dry or session.exact or session.table.target is not None:
        return None
    if session.resident.device.type != "cuda" or not session.one_graph or hooks.graph_break:
        return None
    if any("c10d" in getattr(node.target, "namespace", "") for node in program.calls):
        return None  # a collective would wait for the other ranks
    return mutated(program)
