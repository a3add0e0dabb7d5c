"""Whether a training step is captured: it is tried beside its own code, and taken where that leaves the host behind.

A CUDA graph takes memory of its own beside what the caller gets of it: the step may have to be planned for less.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch

from memopt.common.garbage import collect_all
from memopt.common.phases import phase
from memopt.common.progress import stage
from memopt.cuda_graphs.pool import GraphPool
from memopt.cuda_graphs.step import CudaGraphStep
from memopt.graph.synthesis import same_random_state
from memopt.memory.allocator import allocated_after_gc, slack_bytes
from memopt.memory.allocator_limit import held_bytes, lifted
from memopt.memory.requests import Requests
from memopt.solve.placement import most_bytes
from memopt.step.trial_step import results_of
from memopt.torch_compat.cuda_memory import free_workspaces
from memopt.torch_compat.fake_tensors import no_fake_mode
from memopt.torch_compat.tracing_context import out_of_trace

if TYPE_CHECKING:
    from memopt.compilation.session import Session

log = logging.getLogger("memopt")

# A captured step is taken where it takes less than this share of the other's time, which grows where others use the
# host; one that needs another plan, where it takes less than that share; and one without which the step would be
# planned for less, less than that.
_WORTH, _WORTH_A_PLAN, _INSTEAD_OF_A_PLAN = 1.0, 0.9, 1.05
# One that begins early saves what passes before a step's first kernel, which is no part of a trial: of steps of 90 ms
# on an H100 about 1 %.
_EARLY = 1.01
# Where all is launched in less than this share of a step, its trial would take longer than it could save.
_WAITS = 0.1
# Where launching takes more than this share of a step, a CUDA graph that has no room is worth another plan.
_HOST_BOUND = 0.8
IMPOSSIBLE, NO_NEED = "it cannot be", "the device does not wait for its host"
_SHORT = "memory is short"
# Bytes of the limit that a CUDA graph leaves. What a step allocates beside it comes in segments of 2 MiB where it is
# small, one for each stream, and a CUDA graph has nothing that it could hand back for them.
_BESIDE = 2 * 2**21
# Steps by which both are judged; before them one that sets things up. Captured ones are taken up to so many times, as
# long as they seem no faster: other processes may use the device meanwhile.
_STEPS, _TIMES = 3, 3
# Kernels that do not repeat themselves differ from one step to the next; a CUDA graph may differ by so many times that.
_UNSTEADY = 4.0


class Gain(enum.Enum):
    """Why a step is captured, as reports say it."""

    TIME = "forward and backward of the step are captured as CUDA graphs, which was faster, or as fast to 1 %"
    MEMORY = "forward and backward of the step are captured as CUDA graphs, which takes less memory"


@dataclasses.dataclass(frozen=True)
class CaptureTrial:
    """What came of a trial.

    Attributes:
        reason: why the step is not captured; empty where it is.
        missing_bytes: what it would take beyond the limit, where that is the reason; else 0.
        reserved_bytes: the most that the allocator held in steps of the CUDA graph, where it is taken.
        expected_bytes: what was expected of that, before there was a CUDA graph; 0 where its blocks are not steered.
    """

    reason: str = ""
    missing_bytes: int = 0
    reserved_bytes: int = 0
    expected_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class _Run:
    """Some steps: seconds of each, and until all was launched; numbers that tell results apart; the most bytes held."""

    seconds: list[float]
    host_seconds: list[float]
    digests: list[list[float]]
    reserved_bytes: int

    def joined(self, more: _Run) -> _Run:
        """These steps, and more."""
        return _Run(
            self.seconds + more.seconds,
            self.host_seconds + more.host_seconds,
            self.digests + more.digests,
            max(self.reserved_bytes, more.reserved_bytes),
        )


def try_capture(
    session: Session,
    step: CudaGraphStep,
    pool: GraphPool,
    run: Callable[..., Any],
    given: Sequence[Any],
    written: Collection[int],
    *,
    beyond_limit: bool = False,
) -> CaptureTrial:
    """Take steps as they are and captured, within the limit; leave the step captured where it is faster, and the same.

    Nothing of the caller's changes: what the step writes to is put back.

    Args:
        session: whose step it is.
        step: the graphs of `run`.
        pool: where they are captured.
        run: the compiled graph.
        given: its arguments.
        written: positions of those that it writes to.
        beyond_limit: whether the step as it is has no room within the limit, for how its blocks come to lie; then a
            captured one is taken where it has, and is not much slower.
    """
    device = session.resident.device
    early = _EARLY if step.writes_to(written, given) else 1.0
    worth, worth_a_plan = (_INSTEAD_OF_A_PLAN,) * 2 if beyond_limit else (early * _WORTH, _WORTH_A_PLAN)

    take = functools.partial(_taken, run, given, written, device)

    stage("capturing the step as CUDA graphs")
    with phase("capturing steps"), no_fake_mode(), out_of_trace():
        with lifted(device) if beyond_limit else contextlib.nullcontext():
            plain = take()
            if plain is None:
                return CaptureTrial(_SHORT)
            if not beyond_limit and min(plain.host_seconds) < _WAITS * min(plain.seconds):
                return _given_up(step, pool, NO_NEED)
            beside = _BESIDE + session.resident.coming + session.beside_graphs
            allowed = max(0, (held_bytes(device) or 0) - beside)
            _learn(step, pool, run, given, written, device, allowed)
        captured, expected, unsteered = None, _steered_bytes(step, device), plain.reserved_bytes + _copied_bytes(given)
        # Else a capture would run out of memory.
        if min(expected or unsteered, unsteered) <= allowed:
            step.start(needed=beyond_limit)
            captured = _captured(step, plain, worth, take)
            if step.reason and "out of memory" not in step.reason:
                return _given_up(step, pool, step.reason)
            if captured is None or step.reason:
                captured = None
                step.renew()
                pool.release()
        if captured is None and not beyond_limit:
            # It is not tried beyond the limit: another plan is worth a try where the device waits for its host.
            waits = min(plain.host_seconds) > _HOST_BOUND * min(plain.seconds)
            missing = max(0, min(expected or unsteered, unsteered) - allowed) if waits else 0
            return dataclasses.replace(_given_up(step, pool, _SHORT), missing_bytes=missing)
        if captured is None:
            step.start(needed=True)
            with lifted(device):  # the step itself has no room within it, for how its blocks come to lie
                captured = _captured(step, plain, worth_a_plan, take)
            if captured is None or step.reason:
                return _given_up(step, pool, step.reason or _SHORT)
        over = captured.reserved_bytes - allowed
        found = _judged(plain, captured, worth if over <= 0 else worth_a_plan)
        if found:
            return _given_up(step, pool, found)
        if over > 0:
            _given_up(step, pool, _SHORT)
            return CaptureTrial(_SHORT, over)
        session.holds_beyond(_beyond(session, run, given, written, device))
        return CaptureTrial(reserved_bytes=captured.reserved_bytes, expected_bytes=expected)


def _learn(
    step: CudaGraphStep,
    pool: GraphPool,
    run: Callable[..., Any],
    given: Sequence[Any],
    written: Collection[int],
    device: torch.device,
    allowed: int,
) -> None:
    """Learn what the step asks the allocator for, and pack it into what may be held, where its code tells its lines."""
    steered = step.steered
    if steered is None or device.type != "cuda":
        return
    requests = Requests(device)
    free_workspaces()  # they are asked for within, as in a CUDA graph
    short = contextlib.suppress(torch.OutOfMemoryError, MemoryError)
    with short, phase("trial steps"), requests.noting(), step.watching_lines(requests.before):
        _step(run, given, written, device)
    if requests.blocks:
        beside = allocated_after_gc(device) + most_bytes(requests.blocks, small=True)
        room = max(0, allowed - beside - slack_bytes(allowed, device))
        found = steered.placement = pool.placements.place(requests.blocks, room)
        used = most_bytes(requests.blocks)
        if found is None:
            log.info("blocks of a CUDA graph, %d bytes at once, are not steered: some are mistaken for others", used)
        else:
            log.info("blocks of a CUDA graph, %d bytes at once, are steered in %d", used, found.arena_bytes)


def _steered_bytes(step: CudaGraphStep, device: torch.device) -> int:
    """What the allocator holds where a CUDA graph's blocks are steered, in its memory and beside it; 0 where not."""
    placement = step.steered.placement if step.steered is not None else None
    if placement is None:
        return 0
    small = most_bytes(placement.blocks, small=True)
    return allocated_after_gc(device) + int(placement.arena_bytes) + small


def _given_up(step: CudaGraphStep, pool: GraphPool, reason: str) -> CaptureTrial:
    step.stop(reason)
    pool.release()
    collect_all()  # of what a CUDA graph leaves in cycles, its memory is held by the allocator
    torch.cuda.empty_cache()
    log.info("the step is not captured: %s", reason)
    return CaptureTrial(reason)


def _judged(plain: _Run, captured: _Run, worth: float) -> str:
    """Why a captured step is not taken; empty where it is."""
    known, seen = _distance(plain.digests, plain.digests), _distance(captured.digests, plain.digests)
    if seen > _UNSTEADY * known:
        return f"its results differ from the step's own by {seen:.1e}, those from each other by {known:.1e}"
    before, after = min(plain.seconds), min(captured.seconds)
    log.info("a step takes %.1f ms, captured %.1f ms", 1e3 * before, 1e3 * after)
    return "" if after < worth * before else "it is no faster so"


def _distance(left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> float:
    """The largest relative difference between any two steps' numbers."""
    most = 0.0
    for one in left:
        for other in right:
            for a, b in zip(one, other, strict=True):
                if a != b:
                    most = max(most, abs(a - b) / max(abs(a), abs(b)) if a == a and b == b else float("inf"))
    return most


def _captured(step: CudaGraphStep, plain: _Run, worth: float, take: Callable[[], _Run | None]) -> _Run | None:
    """Captured steps, more of them as long as they seem no faster; None where memory runs out, or they stop."""
    found = take()
    for _ in range(1, _TIMES):
        if found is None or step.reason or min(found.seconds) < worth * min(plain.seconds):
            break
        more = take()
        found = None if more is None else found.joined(more)
    return found


def _taken(
    run: Callable[..., Any], given: Sequence[Any], written: Collection[int], device: torch.device
) -> _Run | None:
    """Take steps from the same state each; None where memory runs out."""
    seconds, hosts, digests = [], [], []
    with phase("timing steps"):
        _begin_anew(device)
        try:
            for index in range(1 + _STEPS):
                taken, host, numbers = _step(run, given, written, device)
                if index:
                    seconds.append(taken)
                    hosts.append(host)
                    digests.append(numbers)
        except (torch.OutOfMemoryError, MemoryError):
            return None
        return _Run(seconds, hosts, digests, torch.cuda.max_memory_reserved(device))


def _begin_anew(device: torch.device) -> None:
    """Leave nothing of earlier steps in the allocator, nor of what it held at most."""
    allocated_after_gc(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)


def _copied_bytes(given: Sequence[Any]) -> int:
    """Bytes that a CUDA graph takes beside the step's own: what is copied in."""
    copied = [value for value in given if isinstance(value, torch.Tensor)]
    return sum(value.nbytes for value in copied if not isinstance(value, torch.nn.Parameter))


def _step(
    run: Callable[..., Any], given: Sequence[Any], written: Collection[int], device: torch.device
) -> tuple[float, float, list[float]]:
    """One step on the arguments themselves; what it writes to, and random states, are put back.

    Returns:
        Seconds of the step, seconds until all of it was launched, and numbers that tell its results apart.
    """
    before = {index: given[index].detach().clone() for index in written if isinstance(given[index], torch.Tensor)}
    with same_random_state(given):
        try:
            torch.cuda.synchronize(device)
            began = time.perf_counter()
            results = results_of(run, given, ())
            host = time.perf_counter() - began
            torch.cuda.synchronize(device)
            seconds = time.perf_counter() - began
            return seconds, host, _digest([*results, *(given[index] for index in before)])
        finally:
            with torch.no_grad():
                for index, value in before.items():
                    given[index].detach().copy_(value)


def _digest(values: Sequence[Any]) -> list[float]:
    """Two numbers of each tensor, in little memory: its sum and its norm, in float32 at least."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor) and value.numel():
            value = value.detach().contiguous()  # numbers are added in one order, however they lie
            if value.is_floating_point():
                wide = torch.float64 if value.dtype is torch.float64 else torch.float32
                found += [value.sum(dtype=wide), torch.linalg.vector_norm(value, dtype=wide)]
            elif not value.is_complex():
                found.append(value.sum())
    return [float(number) for number in found]


def _beyond(
    session: Session, run: Callable[..., Any], given: Sequence[Any], written: Collection[int], device: torch.device
) -> int:
    """What the allocator holds in a captured step beyond what is there when it begins, in bytes."""
    _begin_anew(device)
    before = torch.cuda.memory_allocated(device)
    _step(run, given, written, device)
    return torch.cuda.max_memory_reserved(device) - session.resident.coming - before
