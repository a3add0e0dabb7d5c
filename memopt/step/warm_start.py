"""Warm start: a finished compilation of an earlier process, loaded before a step is traced: its code and its report.

The code lies in torch's cache, whose key covers the graph, its inputs and torch's settings; what memopt decides by
beside these is part of that key, its own source among it. Where a step can be taken, it is, and what does not keep the
budget here and now is planned as if nothing had been known.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from memopt.capture.dynamo import Hooks
from memopt.common.cache_dir import cache_dir
from memopt.common.garbage import looking_once
from memopt.cuda_graphs.signature import StepSignature
from memopt.cuda_graphs.trial import Gain
from memopt.engine import Recalled
from memopt.graph.fake_calls import library_settings
from memopt.memory.allocator import count_library_bytes, library_bytes
from memopt.memory.allocator_limit import held_bytes
from memopt.memory.distributed import has_group
from memopt.program import Program
from memopt.report.packed import packed, unpacked
from memopt.report.record import Report
from memopt.step.backward_entry import BackwardFacts
from memopt.step.budget_state import Step
from memopt.step.budget_trial import keeps, measurable
from memopt.step.compile_cache import CompileCache
from memopt.step.graph_peaks import GraphPeaks
from memopt.step.keys import described, place_of, versions
from memopt.step.planned import fingerprint
from memopt.step.planner import StepPlan

if TYPE_CHECKING:
    from memopt.compilation.session import Session

log = logging.getLogger("memopt")

_MOST = 1 << 50

Recall = Callable[[bytes], Recalled]


@dataclasses.dataclass(frozen=True)
class FinishedStep:
    """What is kept of a finished compilation beside its code. Sizes are in bytes.

    Attributes:
        report: of the step.
        graph: fingerprint of the graph as captured.
        plain: the peak above what is resident, without a plan.
        constants: what is resident beside what the session counts, with the call's inputs.
        whole: what the step was taken to need when its limit was set, which may be a share of that.
        limit: the budget.
        margin, aside: as the session had them.
        libraries: what libraries were seen to keep.
        multiplies: whether they do.
        written: positions of the arguments that the step writes to; None where no step could be taken.
        full_speed: whether the allocator handed nothing back in a step of it.
        gain: what it is captured for; None where it is not.
        signature: of both graphs that are recorded.
        backward: what is looked at when backward begins.
        peaks: what the graph takes as it runs.
        eager: the same as eager runs it.
    """

    report: Report
    graph: str
    plain: int
    constants: int
    whole: int
    limit: int
    margin: int
    aside: int
    libraries: int
    multiplies: bool
    written: tuple[int, ...] | None
    full_speed: bool
    peaks: GraphPeaks
    eager: GraphPeaks
    gain: Gain | None = None
    signature: StepSignature | None = None
    backward: BackwardFacts = dataclasses.field(default_factory=BackwardFacts)


@looking_once()
def warm_started(session: Session, hooks: Hooks, recall: Recall, given: Sequence[Any]) -> Callable[..., Any] | None:
    """The step as it was compiled before, with its report on record; None where it is to be lowered.

    Args:
        session: whose step it is.
        hooks: of its graph.
        recall: the engine's, for this graph.
        given: the caller's arguments.
    """
    if not may_be_alone(session, hooks):
        return None
    found = recall(facts_of(session))
    run = found.run
    hooks.is_known_as(found.key)
    known = FinishedSteps().get(hooks.key) if run is not None else None
    if run is None or known is None or session.calls_of_script(known.graph)[0] > 1:
        return None  # it is planned together with other calls
    if session.graph_pool is not None:
        session.graph_pool.release()
        if known.signature is not None:
            hooks.may_be_captured(run, found.cuda_graph_step(known.signature, session.graph_pool))
    before = session.tighten(0), session.multiplies, session.capture_reserve.bytes
    if taken_up(session, known) and _still_keeps(session, run, hooks, given, known):
        hooks.knows(known.backward)
        log.info("warm start: the step is as an earlier process has compiled it")
        return run
    log.info("the step that was loaded from disk does not keep the budget: planning anew")
    standing, session.multiplies, reserved = before
    session.capture_reserve.restore(reserved)
    session.loosen(standing)
    hooks.may_be_captured(None, None)
    return None


def keep_for_others(session: Session, hooks: Hooks, run: Callable[..., Any]) -> None:
    """Keep a step that was lowered, where a later process may go on with it as it is."""
    step, report, program = session.step, session.report, hooks.captured
    made, keep = hooks.repeatable
    if not hooks.key or keep is None or made is not run or program is None or session.calls > 1:
        return
    if step is None or report is None or step.limit is None or session.exact:
        return
    if not session.one_graph or not step.planned:
        return
    written = measurable(session, hooks) if held_bytes(session.resident.device) is not None else None
    if session.resident.device.type != "cpu" and (written is None or not hooks.tried):
        return  # nothing was seen of it
    kept = dataclasses.replace(
        finished_step(session, hooks, program),
        written=None if written is None else tuple(sorted(written)),
        full_speed=hooks.full_speed,
        gain=hooks.graph_gain,
        signature=None if hooks.graph_gain is None else hooks.capturable[1].signature,
    )
    if FinishedSteps().put(hooks.key, kept):
        keep()


def finished_step(session: Session, hooks: Hooks, program: Program) -> FinishedStep:
    """What is kept of the step of one graph that was lowered last; no step of it was taken.

    Args:
        session: whose step it is.
        hooks: of the graph.
        program: the graph as captured.
    """
    step, report = session.step, session.report
    assert step is not None and report is not None and step.limit is not None
    peaks, eager = session.peaks_at(0)
    return FinishedStep(
        report=report,
        graph=fingerprint(program),
        plain=step.plain,
        constants=step.base - session.resident.total + session.resident.inputs,
        whole=step.whole,
        limit=step.limit,
        margin=session.margin,
        aside=session.capture_reserve.bytes,
        libraries=session.resident.libraries,
        multiplies=session.multiplies,
        written=None,
        full_speed=True,
        peaks=peaks,
        eager=eager,
        backward=hooks.backward_facts(),
    )


class FinishedSteps(CompileCache[FinishedStep]):
    """Finished compilations on disk."""

    kind = "steps"

    @staticmethod
    def encoded(entry: FinishedStep) -> dict[str, Any]:
        """The entry in what JSON can hold."""
        fields = {field.name: getattr(entry, field.name) for field in dataclasses.fields(entry)}
        fields["report"] = base64.b85encode(packed(entry.report)).decode()
        fields["gain"] = None if entry.gain is None else entry.gain.name
        fields["signature"] = None if entry.signature is None else _listed(entry.signature)
        fields["backward"] = entry.backward.listed()
        fields["peaks"], fields["eager"] = (dataclasses.astuple(peaks) for peaks in (entry.peaks, entry.eager))
        return fields

    @staticmethod
    def decoded(record: dict[str, Any]) -> FinishedStep:
        """The entry of a record; errors as `CompileCache` says."""
        report = unpacked(base64.b85decode(record.pop("report")))
        written = record.pop("written")
        if written is not None:
            written = tuple(int(place) for place in written)
        gain, signature, backward = record.pop("gain"), record.pop("signature"), record.pop("backward")
        peaks, eager = (_peaks(*record.pop(name)) for name in ("peaks", "eager"))
        if (gain is None) != (signature is None):
            raise ValueError("a captured step has a signature, and nothing else")
        found = FinishedStep(
            report=report,
            written=written,
            gain=None if gain is None else Gain[gain],
            signature=None if signature is None else _signature(*signature),
            backward=BackwardFacts.of_list(backward),
            peaks=peaks,
            eager=eager,
            **record,
        )
        sizes = (
            found.plain, found.constants, found.whole, found.limit, found.margin, found.aside, found.libraries
        )  # fmt: skip
        if not all(type(size) is int and abs(size) <= _MOST for size in sizes):
            raise ValueError("a size is none")
        if type(found.graph) is not str or not all(type(flag) is bool for flag in (found.multiplies, found.full_speed)):
            raise ValueError("a field is of another kind")
        return found


def _peaks(forward: Any, backward: Any, saved: Any, left: Any, gradients: Sequence[Any], alone: Any) -> GraphPeaks:
    sizes = tuple((str(name), int(size)) for name, size in gradients)
    found = GraphPeaks(int(forward), int(backward), int(saved), int(left), sizes, None if alone is None else int(alone))
    figures = (*dataclasses.astuple(found)[:4], *(size for _, size in sizes), found.alone or 0)
    if not all(0 <= size <= _MOST for size in figures):
        raise ValueError("a size is none")
    return found


def _listed(signature: StepSignature) -> list[Any]:
    return [sorted(signature.fixed), signature.results, signature.saved, list(signature.gradient_of)]


def _signature(fixed: Sequence[Any], results: Any, saved: Any, gradient_of: Sequence[Any]) -> StepSignature:
    found = StepSignature(frozenset(map(int, fixed)), int(results), int(saved), tuple(map(int, gradient_of)))
    if min(found.results, found.saved, *found.fixed) < 0:
        raise ValueError("a place is before the first")
    return found


def may_be_alone(session: Session, hooks: Hooks) -> bool:
    """Whether the graph may be the whole step of a budget, and is lowered for it: no other one has a part in it."""
    if session.budget is None or session.exact or session.table.target is not None or not hooks.needs_gradients:
        return False
    if session.calls > 1 or session.earlier:
        return False  # other calls have a part in the step
    if hooks.graph_break or session.collection.complete or not (session.step is None or session.one_graph):
        return False
    if has_group():
        return False  # other ranks plan the same: none may go another way
    return cache_dir() is not None


def taken_up(session: Session, known: FinishedStep) -> bool:
    """Whether the session stands now as it did when the step was settled: for the same limit in bytes."""
    device = session.resident.device
    session.prepare_allocator()
    session.margin, session.multiplies = known.margin, known.multiplies
    session.capture_reserve.restore(known.aside)
    session.planned_with = session.seen
    further = known.libraries - library_bytes(device) if known.multiplies else 0
    if further > 0:
        count_library_bytes(device, further)
    session.resident = dataclasses.replace(session.resident, libraries=known.libraries)
    base = session.resident.total - session.resident.inputs + known.constants
    session.reference.trains(known.whole, (id(session), (known.graph,)))
    limit = session.held_to(known.whole)
    least = known.report.minimum_bytes or 0
    plan = StepPlan((), known.report.peak_bytes - base, least - base, True)
    session.step = Step(
        (known.graph,), (), plan, known.plain, base, limit, known.whole, known=(known.peaks, known.eager)
    )
    told = [text for text in known.report.notes if known.gain is None or text != known.gain.value]  # it may not be so
    session.report = dataclasses.replace(known.report, notes=tuple(told))
    for text in told:
        session.note(text)
    return limit == known.limit


def _still_keeps(
    session: Session, run: Callable[..., Any], hooks: Hooks, given: Sequence[Any], known: FinishedStep
) -> bool:
    """Whether a step keeps the budget, where one can be taken; it is captured where it was."""
    if known.written is None:
        return held_bytes(session.resident.device) is None
    return keeps(session, run, hooks, given, frozenset(known.written), known.gain, known.full_speed)


def facts_of(session: Session, *, many_sizes: bool = False) -> bytes:
    """What a step's code depends on beside graph, inputs and torch's settings, as one digest.

    Args:
        session: whose step it is.
        many_sizes: whether the code is for many sizes: it is judged by what inputs and the loop hold when it is loaded.
    """
    resident = session.resident
    sizes = dataclasses.replace(resident, libraries=0)  # of these a step tells, when it is taken
    sizes = dataclasses.replace(sizes, inputs=0) if many_sizes else sizes
    names = sorted({(str(each.kind), each.name) for each in session.names().values()})
    facts = [
        versions(), repr(session.budget), session.margin, type(session.engine()).__qualname__, session.model_name,
        repr(session.verify), session.plan_seconds, described(session.rewriting.passes), repr(sizes), session.frozen,
        session.graph_pool is None, names, library_settings(), place_of(resident.device),
        many_sizes or repr(session.seen),
    ]  # fmt: skip
    return b"memopt, " + hashlib.sha256(repr(facts).encode("utf-8", "surrogatepass")).hexdigest().encode()
