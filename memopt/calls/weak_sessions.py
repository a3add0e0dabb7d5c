"""What the parts of a step ask of a model's sessions, or tell them: none of them keeps the sessions alive."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from memopt.calls.guard_fast_path import Plan
from memopt.capture.graph_inputs import Names
from memopt.capture.shadow import model_names
from memopt.compilation.session import Session
from memopt.step.earlier_calls import Ran

if TYPE_CHECKING:
    from memopt.calls.sessions import Sessions


def release(sessions: Mapping[Plan, Session]) -> None:
    """Give back what a model's compiled functions hold between calls: Dynamo keeps them as long as the model itself."""
    release_inference(sessions)
    for session in sessions.values():
        if session.graph_pool is not None:
            session.graph_pool.release()


def release_inference(sessions: Mapping[Plan, Session]) -> None:
    """Give back what functions without gradients hold between calls: their results were copied."""
    for session in sessions.values():
        for function in list(session.functions):
            function.release()


def make_way(sessions: Sessions, *, functions: bool) -> None:
    """Give a call of another kind than the latest the memory that is held between the calls of others.

    A step is planned without the arena that an evaluation runs in, and that without what a step was captured in.

    Args:
        sessions: of one model.
        functions: whether what runs without gradients gives back its memory as well.
    """
    if sessions.graph_pool is not None:
        sessions.graph_pool.release()
    if functions:
        release(sessions)


def kept_more(session: weakref.ref[Session], calls: Sequence[Ran]) -> int:
    """Bytes that backward of these calls takes more where their graphs are kept."""
    known = session()
    return 0 if known is None else known.kept_more(sum(ran.saved for ran in calls))


def planning_available(owner: weakref.ref[Sessions]) -> int | None:
    """Bytes that planning the latest call may take beside what is resident."""
    sessions = owner()
    return None if sessions is None or sessions.last is None else sessions.last.available


def older_outputs(owner: weakref.ref[Sessions]) -> int:
    """Bytes of outputs of earlier steps that the loop still holds."""
    sessions = owner()
    return 0 if sessions is None else sessions.group.older(sessions)


def uncounted_others(owner: weakref.ref[Sessions], *, counts_all: bool) -> int:
    """Bytes of other tensors of the process that a budget is not of: none where it counts all that there is."""
    sessions = owner()
    return 0 if sessions is None or counts_all else sessions.group.others.beside_step


def models_waiting(owner: weakref.ref[Sessions]) -> int:
    """How many other models of the budget were not seen yet."""
    sessions = owner()
    return 0 if sessions is None else sessions.group.waiting()


def reserved_for_others(owner: weakref.ref[Sessions], available: int) -> int:
    """Of what a step may take, what to leave to calls of other models that the budget is of."""
    sessions = owner()
    return 0 if sessions is None else sessions.group.reserve(sessions, available)


def names_of(model: weakref.ref[nn.Module]) -> Names:
    """As `model_names`, of a model that lives: what Dynamo keeps of a call that failed is not to keep its weights."""
    here = model()
    return {} if here is None else model_names(here)


def gradients_of(model: weakref.ref[nn.Module]) -> list[torch.Tensor]:
    """The gradients that the model's parameters have now."""
    here = model()
    return [] if here is None else [p.grad for p in here.parameters() if p.grad is not None]


def allow_limit(owner: weakref.ref[Sessions], session: weakref.ref[Session], limit_bytes: int) -> None:
    """Tell a compiled model, where it still lives, the budget in bytes of a step that is about to run."""
    sessions, known = owner(), session()
    if sessions is not None and known is not None:
        sessions.allow(known, limit_bytes)


def look_at(
    owner: weakref.ref[Sessions], session: weakref.ref[Session], calls: Sequence[Ran], beside: Sequence[Ran]
) -> None:
    """Have sessions look whether a step of these calls, beside those of other models, was over its budget."""
    sessions, known = owner(), session()
    if sessions is not None and known is not None:
        sessions.look(known, calls, beside)


def look_alone(owner: weakref.ref[Sessions], session: Session) -> None:
    """The same of the latest step of a session, of one call."""
    sessions = owner()
    if sessions is not None:
        sessions.look(session, [Ran(tuple(session.ran), {})])
