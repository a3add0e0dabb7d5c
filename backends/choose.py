"""Which engine runs an inference program: the fastest that keeps the budget, by runs on made-up inputs."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from memopt.backends.aten import Boxed, emit
from memopt.backends.static import device_of
from memopt.budget import BudgetError, format_bytes
from memopt.capture.joint import constants_to_attributes
from memopt.common.phases import phase
from memopt.errors import first_line
from memopt.graph.synthesis import same_random_state, synthesize
from memopt.memory.allocator import slack_bytes
from memopt.memory.allocator_limit import held_bytes, lifted
from memopt.memory.measure import measure
from memopt.program import InputKind, Program
from memopt.step.inference import plan_for_less
from memopt.torch_compat.cuda_memory import free_workspaces
from memopt.torch_compat.fake_tensors import no_fake_mode
from memopt.torch_compat.inductor_errors import InductorError
from memopt.torch_compat.tracing_context import out_of_trace

if TYPE_CHECKING:
    from memopt.compilation.session import Session

_WARM = 2
_LEAST, _MOST, _SECONDS = 3, 50, 0.1  # runs that are timed: so many at least and at most, and for so long
_EQUAL = 0.02  # of two that are this near, the one that takes less memory is taken

Bind = Callable[[Program], Boxed]
Made = TypeVar("Made")

# What an engine raises that has no code for a program, or that refuses the made-up inputs.
_FAILURES = (InductorError, RuntimeError, IndexError, ValueError, AssertionError)
# An engine that takes so much longer than one that is over the budget is not taken before less was planned for.
_SLOW = 1.25
_PATIENT = 2  # times at most
_PLANS = 3  # so often is planned for less where what was measured is over the budget


@dataclasses.dataclass(frozen=True)
class Trial:
    """What runs of one engine's function took.

    Attributes:
        name: of the engine.
        function: what ran.
        seconds: the least of a call, the device waited for.
        peak_bytes: the most that was held above what was there before, results and what stays between calls included;
            on CUDA as the allocator reserves, but for its slack.
    """

    name: str
    function: Boxed
    seconds: float
    peak_bytes: int


class SlowerError(Exception):
    """An engine keeps the budget, but a much faster one might with a plan for less.

    Attributes:
        seconds: of a call of the one that keeps it.
        over: by what the other one does not.
    """

    def __init__(self, seconds: float, over: BudgetError) -> None:
        super().__init__(str(over))
        self.seconds, self.over = seconds, over


class Chooser:
    """Makes the function of an inference program.

    The engines are tried one after the other, so that what they hold is never held together; the fastest within the
    budget is kept. What was measured is said in the report's notes.
    """

    def __init__(
        self,
        session: Session,
        engines: Mapping[str, Bind],
        settle: Callable[..., None],
        instead: Mapping[str, Bind] | None = None,
        *,
        patient: bool = False,
    ) -> None:
        """Take what to choose from.

        Args:
            session: for the report.
            engines: by name, what makes a function of a program.
            settle: told the peak of the choice in bytes; raises BudgetError where that is over the budget, or where it
                is told that memory ran out in the trials (`short=True`).
            instead: by name, what takes the place of an engine whose function cannot run.
            patient: on CUDA, raise SlowerError rather than take an engine that is much slower than one over the budget.
        """
        self._session, self._engines, self._settle = session, dict(engines), settle
        self._patient = patient
        self._instead = dict(instead or {})

    def bind(self, program: Program) -> Boxed:
        """The function of the fastest engine that keeps the budget; chosen once, for later values of the weights too.

        Raises:
            BudgetError: none keeps it; `minimum_bytes` is that of the one that comes nearest.
        """
        with no_fake_mode(), torch.no_grad(), out_of_trace():
            if any(node.target is torch.ops.higher_order.with_effects for node in program.calls):
                self._session.note("the model checks its values while it runs: it runs operator by operator")
                self._settle(None)
                return emit(constants_to_attributes(program))
            if len(self._engines) == 1 and self._session.budget is None and not self._instead:
                (bind,) = self._engines.values()
                return bind(program)
            try:
                with lifted(device_of(program)):  # what a run takes is seen, not what it finds
                    trials, short = self._tried_all(program)
                return self._chosen(program, trials, short)
            finally:
                _reserved(device_of(program))  # what trials left behind is given back before the first call

    def _tried_all(self, program: Program) -> tuple[list[Trial], bool]:
        """Trials of the engines that could be tried, and whether memory ran out in one."""
        trials, short = [], False
        for name in list(self._engines):
            try:
                trials.append(self._tried(name, program))
            except torch.OutOfMemoryError:
                short = True
            except _FAILURES as error:
                self._note_failure(name, error)
        self._instead = {}
        return trials, short

    def _chosen(self, program: Program, trials: Sequence[Trial], short: bool) -> Boxed:
        if not trials and short and self._session.budget is not None:
            self._settle(None, short=True)
        if not trials:
            return self._untried(program)
        refused: list[BudgetError] = []
        for trial in in_order(trials):
            try:
                self._settle(trial.peak_bytes)
                if not runs_held(trial.function, program):
                    self._settle(None, short=True)
            except BudgetError as over:
                refused.append(over)
                continue
            if refused and self._patient and _may_wait(program) and trial.seconds > _SLOW * in_order(trials)[0].seconds:
                raise SlowerError(trial.seconds, refused[0])
            self._patient = False
            self._session.inferred.was_timed(trial.seconds)
            self._engines = {trial.name: self._engines[trial.name]}
            if len(trials) > 1:
                self._session.note(_why(trial, trials))
            self._session.runs_on(trial.name)
            return trial.function
        raise min(refused, key=lambda over: over.minimum_bytes)

    def _tried(self, name: str, program: Program) -> Trial:
        """A run of an engine's function, or of the one that takes its place."""
        if name not in self._instead:
            return run_trial(name, self._engines[name], program)
        try:
            return run_trial(name, self._engines[name], program)
        except torch.OutOfMemoryError:
            raise
        except _FAILURES as error:
            self._note_failure(f"{name} with fused library calls", error)
            self._engines[name] = self._instead[name]
            return run_trial(name, self._engines[name], program)

    def _note_failure(self, name: str, error: BaseException) -> None:
        self._session.note(f"{name} could not be tried on made-up inputs: {type(error).__name__}: {first_line(error)}")

    def _untried(self, program: Program) -> Boxed:
        """The first engine that takes the program, which does not run on made-up inputs: the predicted peak decides."""
        self._settle(None)
        *others, last = self._engines.items()
        for name, bind in others:
            try:
                function = bind(program)
            except InductorError:  # it has no code for the program
                continue
            self._engines = {name: bind}
            return function
        return last[1](program)


def within_budget(session: Session, make: Callable[[bool], Made]) -> Made:
    """What `make` plans and makes; planned for less where runs of it took more than the budget.

    Args:
        session: what is planned for.
        make: told whether a much slower engine may be refused by SlowerError.

    Raises:
        BudgetError: nothing that was planned keeps it.
    """
    slow: list[tuple[float, int]] = []  # seconds of what keeps the budget, and what was spared for it
    for attempt in range(_PLANS):
        spared = session.inferred.spared
        try:
            made = make(attempt < _PATIENT)
        except SlowerError as slower:
            slow.append((slower.seconds, spared))
            if session.inferred.unused < 0 or not plan_for_less(session, slower.over):
                break
        except BudgetError as over:
            if slow or not plan_for_less(session, over, last=attempt == _PLANS - 1):
                if not slow:
                    raise
                break
        else:
            if slow and _SLOW * min(slow)[0] < session.inferred.seconds:
                break
            return made
    if slow:
        session.inferred.spares(min(slow)[1])
    return make(False)


def _may_wait(program: Program) -> bool:
    """Whether a plan for less is worth another compilation: on CUDA, where engines differ in memory by more."""
    return device_of(program).type == "cuda"


def in_order(trials: Sequence[Trial]) -> list[Trial]:
    """The fastest first; of those that are nearly as fast as it, the one that takes least."""
    enough = (1 + _EQUAL) * min(trial.seconds for trial in trials)
    first = sorted((trial for trial in trials if trial.seconds <= enough), key=lambda trial: trial.peak_bytes)
    return first + sorted((trial for trial in trials if trial.seconds > enough), key=lambda trial: trial.seconds)


def _why(chosen: Trial, trials: Sequence[Trial]) -> str:
    figures = [f"{t.name} {t.seconds * 1e3:.3f} ms and {format_bytes(t.peak_bytes, short=True)}" for t in trials]
    faster = [trial for trial in trials if trial.seconds < chosen.seconds and trial is not chosen]
    reason = "the fastest" if not faster else "as fast as the fastest, in less memory"
    if any(trial.seconds * (1 + _EQUAL) < chosen.seconds for trial in faster):
        reason = "the fastest that keeps the budget"
    return f"{chosen.name} runs this model, {reason}: a call took {', '.join(figures)} beside weights and inputs"


def run_trial(name: str, bind: Bind, program: Program) -> Trial:
    """Bind a program, run it on made-up inputs, and give back what it holds between calls.

    Raises:
        InductorError: the engine has no code for the program.
        RuntimeError, IndexError, ValueError: an operator refuses the made-up inputs, or memory ran out.
    """
    device = device_of(program)
    lost = _lost(device)
    with _made_up(program) as arguments:
        before = _reserved(device) - lost
        function = bind(program)
        try:
            with phase("timing engines"):
                for _ in range(_WARM):
                    function(list(arguments))
                seconds = _seconds(function, arguments, device)
                peak = _peak(function, arguments, device, before)
        finally:
            release = getattr(function, "release", None)
            if release is not None:
                release()
    return Trial(name, function, seconds, peak)


def runs_held(function: Boxed, program: Program) -> bool:
    """Whether a function runs, as one CUDA graph if it did so in its trial, where the allocator is held to a limit.

    What a trial reserves without the limit may not fit under it: blocks lie elsewhere. What the run captures stays.
    """
    device = device_of(program)
    if held_bytes(device) is None:
        return True
    reason = getattr(function, "no_graph", "")
    _reserved(device)
    with _made_up(program) as arguments:
        try:
            function(arguments)
        except torch.OutOfMemoryError:
            return False
        except _FAILURES:  # it has run before: the call itself will tell
            return True
    return getattr(function, "no_graph", "") == reason


@contextlib.contextmanager
def _made_up(program: Program) -> Iterator[list[Any]]:
    """What a program's function is called with: its weights, and made-up inputs."""
    fakes = [node.meta["val"] for node in program.placeholders]
    with same_random_state(fakes):
        yield [
            program.state[entry.name] if entry.name in program.state else synthesize(fake)
            for entry, fake in zip(program.inputs, fakes, strict=True)
            if entry.kind is not InputKind.CONSTANT
        ]


def _seconds(function: Boxed, arguments: Sequence[Any], device: torch.device) -> float:
    taken: list[float] = []
    while len(taken) < _LEAST or (sum(taken) < _SECONDS and len(taken) < _MOST):
        began = time.perf_counter()
        function(list(arguments))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return min(taken)  # other work on the device only ever adds


def _peak(function: Boxed, arguments: Sequence[Any], device: torch.device, before: int) -> int:
    if device.type == "cuda":
        _reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
        function(list(arguments))
        torch.cuda.synchronize(device)
        # The last segments may be almost empty: that is slack, which a budget leaves to the allocator anyway.
        return max(0, int(torch.cuda.max_memory_reserved(device)) - before - slack_bytes(0, device))
    held = int(getattr(function, "held_bytes", 0))
    return held + measure(lambda: function(list(arguments)), device=device).peak_bytes


def _lost(device: torch.device) -> int:
    """Bytes that the allocator holds now and no tensor has: beside weights and inputs, no more than its slack."""
    if device.type != "cuda":
        return 0
    return min(_reserved(device) - int(torch.cuda.memory_allocated(device)), slack_bytes(0, device))


def _reserved(device: torch.device) -> int:
    """What CUDA's allocator holds once nothing is cached, by libraries neither; 0 on other devices."""
    if device.type != "cuda":
        return 0
    gc.collect()
    free_workspaces()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved(device))
