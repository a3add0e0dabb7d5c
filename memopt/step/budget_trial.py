"""Trial steps of compiled code against its budget, run before the caller's own: over it, the step is planned again."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from memopt.budget import BudgetError
from memopt.capture.dynamo import Hooks
from memopt.common.garbage import collect_all, looking_once
from memopt.cuda_graphs.trial import IMPOSSIBLE, NO_NEED, CaptureTrial, Gain, try_capture
from memopt.graph.targets import is_collective
from memopt.memory.allocator import slack_bytes, stuck_bytes
from memopt.memory.allocator_limit import held_bytes
from memopt.step.exact_trial import refused_as_tried
from memopt.step.trial_step import Short, TrialMemory, is_short, mutated
from memopt.step.trial_steps import Held, TrialSteps, begin_anew
from memopt.step.verified_minimum import verified

if TYPE_CHECKING:
    from memopt.compilation.session import Session
    from memopt.program import Program

log = logging.getLogger("memopt")

# How often a step is planned for less because of what the allocator reserves.
_ROUNDS = 2
# After a step that ran out of memory, plan for less by limit / _SHORT.
_SHORT = 16
# If the shortfall is known, tighten by it plus a fragmentation margin of limit / N; N depends on the rounds left. A
# larger margin is often more than any plan can give near the minimum.
_SPREAD = {2: 256, 1: 64}
# If the step keeps the budget only because the allocator hands back its cache each time, tighten by limit / _SLOW.
_SLOW = 50


@looking_once()
def lower_within(
    session: Session, lower: Callable[[], tuple[Callable[..., Any], Hooks]], hooks: Hooks, given: Sequence[Any]
) -> Callable[..., Any]:
    """Lower one graph, take a step with it, and lower it for less while the allocator reserves more than the budget.

    If memory still runs out in the step of an engine's own code, the graph is lowered operator by operator. If that
    does not keep the budget either, the minimum that the refusal names was kept by such a step.

    Args:
        session: whose graph it is.
        lower: compiles the graph under the session's present budget.
        hooks: of the graph.
        given: the caller's arguments.

    Raises:
        BudgetError: no plan keeps the budget, or none whose step does not run out of memory within it.
    """
    if session.graph_pool is not None:
        session.graph_pool.release()
    session.capture_reserve.uses_cuda_graphs(None)
    try:
        lowered = _lowered_within(session, lower, given)
    except BudgetError as error:
        refused = error
    else:
        hooks.was_tried(lowered.tried, full_speed=lowered.full_speed)
        return lowered.run if lowered.captured else _captured(session, lower, lowered, given)
    # Out here, so that no traceback holds on to what was lowered.
    if session.has_other_ways or session.fallbacks.has_less_than(session, refused):
        raise refused  # its minimum is not tried: that would take more than the budget of a step that keeps it
    if session.engine().rehearses and measurable(session, hooks) is not None:
        refused = verified(session, refused, lambda: _lowered_within(session, lower, given).kept)
    refused = refused_as_tried(session, refused)
    raise _explained(refused, session.resident.device)


def _explained(refused: BudgetError, device: torch.device) -> BudgetError:
    """The refusal, saying what of it the allocator does not hand back, where that is more than is left to it anyway."""
    stuck = stuck_bytes(device) if device.type == "cuda" else 0
    if stuck <= slack_bytes(refused.budget_bytes, device):
        return refused
    return BudgetError(refused.minimum_bytes, refused.budget_bytes, refused.breakdown, stuck, refused.beside)


@dataclasses.dataclass(frozen=True)
class _Lowered:
    """A compiled graph.

    Attributes:
        run: runs it.
        hooks: what its engine knows of it.
        captured: whether its step is captured.
        cache_bytes: what the allocator is to hold when a step begins, in one piece; 0 where that is not known.
        tried: whether a step was taken within the budget.
        full_speed: whether the allocator handed nothing back in it to keep that.
    """

    run: Callable[..., Any]
    hooks: Hooks
    captured: bool = False
    cache_bytes: int = 0
    tried: bool = True
    full_speed: bool = True

    @property
    def kept(self) -> Program | None:
        """The step as it was captured first, where one was taken within the budget."""
        return self.hooks.first if self.tried else None


def _captured(
    session: Session,
    lower: Callable[[], tuple[Callable[..., Any], Hooks]],
    lowered: _Lowered,
    given: Sequence[Any],
) -> Callable[..., Any]:
    """The step captured where that is faster; lowered for less for it, once, where it needs the room."""
    found = _tried(session, lowered.run, lowered.hooks, given, measurable(session, lowered.hooks))
    if not found.missing_bytes:
        _go_without(session, lowered, found)
        return lowered.run
    log.info("a captured step lacks %d bytes: planning again", found.missing_bytes)
    beyond, known = session.beyond, _tighten(session, found.missing_bytes)
    with contextlib.suppress(BudgetError):
        other = _lowered_within(session, lower, given)
        written = measurable(session, other.hooks)
        again = CaptureTrial() if other.captured else _tried(session, other.run, other.hooks, given, written)
        if not again.reason:
            lowered.hooks.was_tried(lowered.tried, full_speed=other.full_speed)
            return other.run
        found = again
    session.loosen(known)
    session.beyond = beyond
    _go_without(session, lowered, found)
    return lowered.run


def _go_without(session: Session, lowered: _Lowered, found: CaptureTrial) -> None:
    """Say why the step is not captured, where it was tried, and leave the allocator as it was before."""
    if found.reason and found.reason != IMPOSSIBLE and lowered.cache_bytes:
        begin_anew(session.resident.device, lowered.cache_bytes)
    if found.reason not in ("", IMPOSSIBLE, NO_NEED):
        session.note(f"the step is not captured: {found.reason}")


def _tried(
    session: Session,
    run: Callable[..., Any],
    hooks: Hooks,
    given: Sequence[Any],
    written: frozenset[int] | None,
    gain: Gain = Gain.TIME,
) -> CaptureTrial:
    """The step captured for that gain, where there is one."""
    made, step = hooks.capturable
    allowed = held_bytes(session.resident.device)
    possible = step is not None and not hooks.lets_go  # outputs of CUDA graphs lie where backward writes then
    if not possible or made is not run or session.graph_pool is None or written is None or allowed is None:
        return CaptureTrial(IMPOSSIBLE)
    beyond = gain is Gain.MEMORY
    found = try_capture(session, step, session.graph_pool, run, given, written, beyond_limit=beyond)
    hooks.uses_cuda_graphs(None if found.reason else gain)
    if not found.reason:
        session.note(gain.value)
        others, taken = allowed - session.limit_bytes, found.reserved_bytes + session.resident.coming
        session.capture_reserve.uses_cuda_graphs(allowed - taken)
        session.took(taken - others)  # nothing else counts its memory
        session.expects(found.expected_bytes - others)
    return found


def _lowered_within(
    session: Session, lower: Callable[[], tuple[Callable[..., Any], Hooks]], given: Sequence[Any]
) -> _Lowered:
    """As `lower_within`; captured only where the step keeps the budget so, and would not as it is."""
    margin = session.margin
    run, hooks = lower()
    for left in reversed(range(_ROUNDS + 1)):
        device = session.resident.device
        written, allowed = measurable(session, hooks), held_bytes(device)
        if written is None or allowed is None:
            return _Lowered(run, hooks, tried=False)
        steps = TrialSteps(run, hooks, given, written, session.resident)
        taken = steps.free(allowed)
        if isinstance(taken, TrialMemory):
            if taken.kept_bytes > session.resident.libraries:
                session.keep_libraries(taken.kept_bytes - session.resident.libraries)
                allowed = held_bytes(device) or allowed
            session.took(taken.allocated_bytes + session.resident.coming - (allowed - session.limit_bytes))
        coming = session.resident.coming  # what the optimizer's first steps add, within the same limit
        over = taken.reserved_bytes + coming - allowed if isinstance(taken, TrialMemory) else 0
        held = taken if isinstance(taken, Short) else _held(session, steps, taken, allowed)
        if isinstance(held, Held) and (held.full_speed or (over <= 0 and not left)):
            return _Lowered(run, hooks, cache_bytes=held.cache_bytes, full_speed=held.full_speed)
        within = isinstance(held, Held) and over <= 0
        lacking = 0
        # It is how its blocks come to lie.
        if isinstance(taken, TrialMemory) and taken.allocated_bytes + coming <= allowed:
            found = _tried(session, run, hooks, given, written, Gain.MEMORY)
            if not found.reason:
                return _Lowered(run, hooks, captured=True)
            lacking = found.missing_bytes
        if isinstance(held, Short):
            near = held.missing_bytes + allowed // _SPREAD.get(left, _SHORT)
            over = max(over, near if held.missing_bytes else allowed // _SHORT)
        elif within:
            over = allowed // _SLOW
        over = min(over, lacking) if lacking else over
        if not left or session.naming:  # nothing takes less than the deepest plan
            break
        log.info("the allocator holds %d bytes more than the budget in a step: planning again", over)
        known = _tighten(session, over)
        try:
            run, hooks = lower()
        except BudgetError:
            session.loosen(known)
            if within:
                return _Lowered(run, hooks, full_speed=False)
            break
    if isinstance(held, Short) and (held.others or is_short(device, held_bytes(device) or 0)):
        session.note("the device had less than the budget, for what others hold: no step was taken within it")
        return _Lowered(run, hooks, tried=False)
    # The caller's own step would run out of memory as well.
    if isinstance(held, Short):
        refusal = session.over(session.limit_bytes + over, session.limit_bytes)
        if session.exact or session.code_fails or session.naming:
            raise refusal
        session.margin, session.code_fails = margin, True  # its operators may take less than code, in another order
        session.forget_plan()
        try:
            return _lowered_within(session, lower, given)
        except BudgetError as error:
            if error.minimum_bytes <= refusal.minimum_bytes:
                raise
        finally:
            session.code_fails = False
        raise refusal
    session.note("the allocator reserves more than the step needs: it is held to the budget, which takes time")
    return _Lowered(run, hooks, full_speed=False)


def keeps(
    session: Session,
    run: Callable[..., Any],
    hooks: Hooks,
    given: Sequence[Any],
    written: frozenset[int],
    gain: Gain | None,
    full_speed: bool,
) -> bool:
    """Whether a step of compiled code, taken here, keeps the budget as one did elsewhere.

    Args:
        session: whose step it is.
        run: the compiled graph.
        hooks: of the graph.
        given: the caller's arguments.
        written: positions of those that the step writes to.
        gain: what it was captured for there, and is here, where there is still such a gain; None: it was not.
        full_speed: whether the allocator handed nothing back there, and must not here.
    """
    device = session.resident.device
    allowed = held_bytes(device)
    if allowed is None:
        return False
    steps = TrialSteps(run, hooks, given, written, session.resident)
    taken = steps.free(allowed)
    if isinstance(taken, Short) or taken.kept_bytes > session.resident.libraries:
        return False
    session.took(taken.allocated_bytes + session.resident.coming - (allowed - session.limit_bytes))
    if gain is Gain.MEMORY:
        fits = taken.allocated_bytes + session.resident.coming <= allowed
        return fits and not _tried(session, run, hooks, given, written, gain).reason
    held = _held(session, steps, taken, allowed)
    if isinstance(held, Short) or (full_speed and not held.full_speed):
        return False
    if gain is Gain.TIME:
        lowered = _Lowered(run, hooks, cache_bytes=held.cache_bytes)
        _go_without(session, lowered, _tried(session, run, hooks, given, written))
    return True


def _held(session: Session, steps: TrialSteps, taken: TrialMemory, allowed: int) -> Held | Short:
    """As `TrialSteps.held`; what the caller's steps are to begin with is the session's from now on."""
    held = steps.held(taken, allowed)
    if isinstance(held, Held):
        session.beyond = held.cache_bytes - session.resident.coming - taken.before_bytes
    return held


def _tighten(session: Session, size: int) -> Any:
    """Plan for so many bytes less than the code takes now: what it leaves of the budget did not help."""
    collect_all()  # what tries have left would lie beside the next one
    return session.tighten(size + size // 8 + session.unused())


def step_decides(session: Session, hooks: Hooks, excess: int) -> bool:
    """Whether code that is `excess` bytes over what the budget leaves to tensors is to be judged by a step.

    So it is where only what the allocator may lose is lacking, and it was not seen to lose so much.
    """
    if session.margin or held_bytes(session.resident.device) is None or measurable(session, hooks) is None:
        return False
    return excess <= session.limit_bytes - session.usable(session.limit_bytes) - session.capture_reserve.bytes


def measurable(session: Session, hooks: Hooks) -> frozenset[int] | None:
    """What a step of this graph writes to, where one may be taken: the whole step is here, alone and for real."""
    program = hooks.captured
    if program is None or hooks.dry or session.exact or session.table.target is not None:
        return None
    if session.resident.device.type != "cuda" or not session.one_graph or session.calls > 1 or hooks.graph_break:
        return None
    if any(is_collective(node.target) for node in program.calls):
        return None  # it would wait for the other ranks
    return mutated(program)
