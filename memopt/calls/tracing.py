"""A model's call under torch.compile: each of its graphs handed to a session."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memopt.budget import BudgetError, format_bytes
from memopt.calls.dynamo_settings import settings_of
from memopt.calls.failures import note_graph
from memopt.calls.pace import pace_of
from memopt.calls.written_twice import tell_written
from memopt.capture.attention import attention_as_on
from memopt.capture.boundary import at_boundary
from memopt.capture.dynamo import Hooks, is_part
from memopt.capture.eager_call import eager_call
from memopt.capture.eager_step import eager_step, has_checkpoints, roots_of, written_in_checkpoints
from memopt.capture.export import NotCapturedError, NotTracedError
from memopt.capture.let_go import watched_for_outputs
from memopt.capture.loss_alone import (
    attached,
    detach_outputs,
    drop_outputs,
    in_place_of_dropped,
    others_than_the_loss,
)
from memopt.capture.outside import OUTSIDE, Mark
from memopt.capture.rehearsal import ledger_for, run_backward
from memopt.capture.same_graph import description
from memopt.capture.shadow import Shadow
from memopt.common.own_files import MEMOPT, is_pythons
from memopt.common.progress import captured, stage
from memopt.common.random_streams import streams_kept
from memopt.compilation.part_by_loss_alone import DROPPED
from memopt.compilation.session import Session
from memopt.engine import ManySizes, Recalled
from memopt.errors import first_line
from memopt.memory.ledger import within_graph
from memopt.memory.reach import shown_tensors
from memopt.memory.tangents import Tangents, tangents_of
from memopt.program import Program
from memopt.step.backward_entry import BackwardFacts, watched
from memopt.step.budget_trial import lower_within
from memopt.step.by_loss_alone import MORE
from memopt.step.earlier_calls import Figures
from memopt.step.graph_peaks import step_peak
from memopt.step.planner import StepPlan
from memopt.step.recomputed_calls import recomputable
from memopt.step.warm_start import keep_for_others, warm_started
from memopt.torch_compat.dynamo import Kept, compiled_module, with_own_entry
from memopt.torch_compat.dynamo_errors import place_in_model
from memopt.torch_compat.fully_sharded import sharded_captured
from memopt.torch_compat.logging_calls import silence
from memopt.torch_compat.not_returned import NotReturned, Untouched
from memopt.torch_compat.saved_tensors import saved_as_it_is
from memopt.torch_compat.source_files import TORCH
from memopt.torch_compat.symbols import is_symbolic
from memopt.torch_compat.tracing_context import in_trace
from memopt.torch_compat.valued_fakes import UNKNOWN_VALUE, is_unknown

_TWICE = (
    "{} cannot be captured: it takes gradients with create_graph=True, and graphs have first derivatives only: compile "
    "the parts of it that are not differentiated twice"
)


def collect(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], session: Session) -> list[Program]:
    """Capture all graphs of one call on fake tensors, in order; neither model nor inputs are touched.

    Raises:
        NotCapturedError: the model cannot run without real data.
    """
    shadow = Shadow(model)
    fake_args, fake_kwargs = shadow.inputs(args, kwargs)
    try:
        try:
            collected, returned = _collected(model, shadow, fake_args, fake_kwargs, session)
        except Exception:
            if not session.fallbacks.part.gives_way():
                raise
            return collect(model, args, kwargs, session)
        if not session.fallbacks.decides(returned):
            return collect(model, args, kwargs, session)
        if session.asks_for_eager and session.role.trains:
            # A fraction is of about what eager takes: values between graphs are beside all that the graphs hold.
            eager = eager_call(model, args, kwargs, session.table, tangents_stay=True)
            session.eager.takes(None if eager is None else eager.peaks)
        return collected
    except (*UNKNOWN_VALUE, NotImplementedError, RuntimeError) as error:
        if not isinstance(error, NotImplementedError) and not is_unknown(error):
            raise
        raise NotCapturedError(
            f"{type(model).__name__} cannot be planned without running it: its control flow or its shapes depend "
            f"on the values of tensors{_place_of(error)}: move that line out of the model, or leave the budget out"
        ) from error


def _collected(
    model: nn.Module, shadow: Shadow, args: Any, kwargs: Any, session: Session
) -> tuple[list[Program], list[Any]]:
    """All graphs of one call with fake arguments, and what it returns."""
    with session.collects(shadow.names) as collected, contextlib.ExitStack() as settings:
        for setting in (shadow.running(), settings_of(session), silence(), streams_kept(), saved_as_it_is()):
            settings.enter_context(setting)
        settings.enter_context(sharded_captured(shadow.model))
        kept = Kept(dynamo_backend(session))
        compiled = with_own_entry(compiled_module(shadow.model, kept.while_kept(), dynamic=False))
        mark = session.outside.mark((args, kwargs))
        return collected, _rehearsed(session, model, lambda: compiled(*args, **kwargs), mark)


def _place_of(error: BaseException) -> str:
    """The line of the model that an error comes from, where there is one."""
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    own = [place for place in places if not place[0].startswith((TORCH, MEMOPT, "<")) and not is_pythons(place[0])]
    if own:
        return f" at {os.path.basename(own[-1][0])}:{own[-1][1]}"
    known = place_in_model(error.__cause__ or error)  # in 2.11 no frame of the model's is among them
    return f" at {known}" if known else ""


def _rehearsed(session: Session, model: nn.Module, call: Callable[[], Any], mark: Mark) -> list[Any]:
    """Run one call on fake tensors, forward and backward, and count what runs outside of captured graphs.

    Returns:
        What the call has returned, and nothing else.

    Raises:
        NotCapturedError: what runs there has no backward on fake tensors, and there is a budget to be kept.
    """
    ledger = None if session.collection.rehearsing or session.budget is None else ledger_for(model)
    session.counts_in(ledger)
    with contextlib.nullcontext() if ledger is None else ledger:
        returned = [call()]
        outputs = shown_tensors(returned[0])
        told, failed = session.outside.line_of(model, outputs, mark), ""
        session.outside.rehearses(model, outputs, mark)
        tangents = tangents_of(roots_of(outputs)) if ledger is not None and torch.is_grad_enabled() else Tangents()
        if ledger is not None and told is not None and torch.is_grad_enabled():
            try:
                run_backward(outputs, ledger)
            except Exception as error:  # whatever the user's operators do on fake tensors
                failed = first_line(error)
    if ledger is not None:
        peak, beside = (0, 0) if told is None else (ledger.peak, ledger.beside)
        session.count_outside(peak, beside, (told or "").removeprefix(OUTSIDE), tangents)
    _tell(session, told)
    if failed:
        raise NotCapturedError(f"{told}: what they take is not known without running them: {failed}")
    return returned


def note_outside(session: Session, model: nn.Module, outputs: Any, mark: Mark) -> None:
    """Tell the user what of a call that has ended ran outside of captured graphs."""
    _tell(session, session.outside.line_of(model, outputs, mark))


def _tell(session: Session, told: str | None) -> None:
    if told is None:
        return
    session.unsay(OUTSIDE)
    if session.outside_bytes:
        session.note(f"{told}; they take {format_bytes(session.outside_bytes, short=True)}, which is counted")
    else:
        session.note(f"{told}; their memory is not counted")


def dynamo_backend(session: Session, *, symbolic: bool = False) -> Callable[..., Any]:
    """A fresh Dynamo backend that hands each graph to the session's engine, with `symbolic` sizes as they come."""
    lowered = list[tuple[Any, StepPlan | None, Callable[..., Any]]]()  # graphs, their step's plan, what runs them

    @saved_as_it_is()
    def memopt(graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        target = session.table.target
        if not session.dry:
            nodes = len(graph_module.graph.nodes)
            captured(nodes, pace_of(session).seconds)
            stage(f"a graph of {nodes} nodes is captured")
        session.outside.saw(graph_module)
        others = others_than_the_loss(graph_module) if torch.is_grad_enabled() else None
        by_loss_alone = others is not None and session.fallbacks.plans_for_loss_alone(
            session, graph_module, example_inputs, others=bool(others), whole=not is_part(graph_module)
        )
        stands: Sequence[torch.Tensor | None] = ()
        fixed, way = not is_symbolic(example_inputs), ""
        if others and fixed and not by_loss_alone and is_part(graph_module):
            way = session.fallbacks.way_of_part(session, graph_module, example_inputs)
        if way == DROPPED or (by_loss_alone and session.fallbacks.by_loss_alone.why and fixed):
            stands, others = drop_outputs(graph_module, Untouched if way else NotReturned), ()
        elif (way or by_loss_alone) and others:
            detach_outputs(graph_module, others)
        hooks = Hooks(session, graph_module, example_inputs)
        if by_loss_alone and session.fallbacks.by_loss_alone.held:
            hooks.let_go_before_backward()
        if hooks.graph_break:
            session.is_in_parts()
        if hooks.graph_break and not hooks.needs_gradients:
            session.see_whole_step()
        elif hooks.graph_break and hooks.reaches_gradients:
            session.see_whole_step_of_training()

        graph = None
        if hooks.needs_gradients and session.collection.graphs is None and not symbolic:
            told = description(graph_module, example_inputs)
            graph = told and (told, by_loss_alone or way, others, [stand is None for stand in stands], hooks.lets_go)
        for known, plan, code in lowered if graph is not None else ():
            if known == graph and plan is _plan_of(session):
                return code

        checkpointed = hooks.needs_gradients and has_checkpoints(graph_module)
        if checkpointed:
            session.aim_at_eager()

        def lower() -> tuple[Callable[..., Any], Hooks]:
            allowing: BudgetError | None = None
            while True:  # a function that called itself would be a cycle, and keep the call's inputs as garbage
                if session.eager.lowered is None and hooks.needs_gradients and (checkpointed or session.asks_for_eager):
                    eager = eager_step(graph_module, example_inputs)
                    if eager is not None:  # operators are run alone within what the step takes at least
                        session.takes_alone(step_peak([eager.peaks()]))
                        session.eager.lowers(peaks := eager.peaks(session.table))
                        session.takes_alone(step_peak([peaks]))
                try:
                    return session.engine().compile_captured(graph_module, example_inputs, hooks), hooks
                except BudgetError as error:
                    if session.allows_no_more():
                        allowing = allowing or error
                    elif not session.aim_no_more():
                        if allowing is None:
                            raise
                        break
            raise allowing  # it names what does with a loss outside of the graph

        def looked_after(run: Callable[..., Any], facts: BackwardFacts) -> Callable[..., Any]:
            run = watched(run, facts, session.short_of_memory, inside)
            stages = session.fallbacks.by_loss_alone
            if (by_loss_alone or way) and others:
                run = attached(run, others, stages.needed or MORE)
            if hooks.lets_go:
                run = watched_for_outputs(run, session.unused, stages.held)
            return in_place_of_dropped(run, stands) if stands else run

        def inside() -> Exception | None:
            return NotTracedError(_TWICE.format(session.model_name)) if session.in_call or session.dry else None

        def for_many_sizes() -> Callable[..., Any]:
            code = session.engine().compile_symbolic(graph_module, example_inputs, hooks)
            run = _noted_at_any_size(code, session, hooks)
            if not hooks.needs_gradients:
                return run
            return _told(looked_after(run, _at_any_size(hooks.backward_facts(), example_inputs)), session)

        def recall(facts: bytes) -> Recalled:
            return session.engine().recall(graph_module, example_inputs, hooks, facts)

        collected = session.collection.graphs
        first = len(collected or ())
        with session.timed("tracing"), attention_as_on(None if target is None else target.type):
            try:
                if symbolic and is_symbolic(example_inputs):
                    return for_many_sizes()
                run = None if session.dry else warm_started(session, hooks, recall, example_inputs)
                if run is None:
                    run = lower_within(session, lower, hooks, example_inputs)
                    if checkpointed and hooks.captured is not None:
                        tell_written(session, written_in_checkpoints(hooks.captured))
                    keep_for_others(session, hooks, run)
                if collected is not None:
                    run = _counted(run, session, collected, first)
                    if hooks.needs_gradients:
                        run = watched(run, BackwardFacts(), session.short_of_memory, inside)
                    run = session.fallbacks.part.noted(run, stands) if way else run
                    return in_place_of_dropped(run, stands) if stands else run
                run = _noted(_recomputable(run, session, hooks), session, hooks)
                if not hooks.needs_gradients:
                    return run
                run = _told(looked_after(run, hooks.backward_facts()), session)
                if graph is not None:
                    plan = _plan_of(session)
                    lowered[:] = [*(item for item in lowered if item[1] is plan), (graph, plan, run)]
                return run
            except Exception as error:
                note_graph(error, graph_module)
                raise
            finally:
                if not session.dry:
                    session.forget_search()  # kept so far: a step that is lowered for less is not searched again
                session.eager.ends()
                hooks.forget()

    return at_boundary(memopt, check=session.verify is True, laid_out=lambda: bool(session.layout.contiguous))


def _plan_of(session: Session) -> StepPlan | None:
    """The plan that a session's graphs are lowered by; None where there is none."""
    return None if session.step is None else session.step.plan


def _at_any_size(facts: BackwardFacts, example_inputs: Sequence[Any]) -> BackwardFacts:
    """Facts of a graph that is called with sizes among its inputs, of which autograd knows nothing, and at others."""
    pairs = zip(facts.sources, example_inputs, strict=False)  # none where it is not known
    of_tensors = tuple(read for read, value in pairs if isinstance(value, torch.Tensor))
    return dataclasses.replace(facts, sources=of_tensors, tangents=())


def _noted_at_any_size(code: ManySizes, session: Session, hooks: Hooks) -> Callable[..., Any]:
    """As `_noted`, of code that is counted anew for larger sizes before it runs."""
    step: Any = None  # whose figures these are: most sizes are run by the step that was counted last
    captured: Program | None = None
    graph: Figures | None = None

    def noted(*args: Any) -> Any:
        nonlocal step, captured, graph
        code.count_for(args)
        if session.budget is not None and hooks.needs_gradients:
            if graph is None or step is not session.step or captured is not hooks.captured:
                step, captured = session.step, hooks.captured
                graph = session.figures(captured)
            if graph is not None:
                session.runs(graph)
            session.makes_way(graph)
        return code.run(*args)

    return noted


def _recomputable(run: Callable[..., Any], session: Session, hooks: Hooks) -> Callable[..., Any]:
    """`run`, whose first calls can let go of what they saved, where it is all that there is of a call's step.

    What a captured step saves lies in memory of its CUDA graphs, which is not given back.
    """
    facts = hooks.backward_facts() if session.budget is not None and hooks.needs_gradients else None
    if facts is None or facts.written is None or hooks.graph_break or session.broken or hooks.graph_gain is not None:
        return run
    names = [hooks.called(place) for place in range(len(hooks.origins))]
    return recomputable(run, facts.written, session.model_name, session.recomputable, names.__getitem__)


def _noted(run: Callable[..., Any], session: Session, hooks: Hooks) -> Callable[..., Any]:
    """`run`, which tells a session with a budget when a graph of a training step is about to run."""
    graph = session.figures(hooks.captured) if session.budget is not None and hooks.needs_gradients else None
    if graph is None:
        return run
    known, captured = graph, hooks.graph_gain is not None

    def noted(*args: Any) -> Any:
        session.runs(known)
        if not captured:
            session.makes_way(known)
        return run(*args)

    return noted


def _told(run: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """`run` of a training step, which tells a session with a budget what it returns: a model may keep of that."""
    if session.budget is None:
        return run

    def told(*args: Any) -> Any:
        results = run(*args)
        session.returns(results)
        return results

    return told


def _counted(run: Callable[..., Any], session: Session, collected: list[Program], first: int) -> Callable[..., Any]:
    """`run`, which lists the programs collected since `first` as often as a step calls it: blocks share code.

    While Dynamo is tracing it is no step that does: DDP's buckets are compiled by calling one for the next.
    """
    programs = collected[first:]
    del collected[first:]

    def counted(*args: Any) -> Any:
        if not in_trace():
            collected.extend(programs)
        with within_graph(session.ledger):
            return run(*args)

    return counted
