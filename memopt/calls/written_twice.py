"""Buffers that eager writes to twice in a step, as it recomputes what is checkpointed, and a compiled step once."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from memopt.capture.eager_step import written_in_checkpoints
from memopt.compilation.session import Session
from memopt.torch_compat.saved_tensors import in_checkpoint

log = logging.getLogger("memopt")


def tell_written(session: Session, buffers: Sequence[str]) -> None:
    """Say which buffers hold other values than in eager, which runs what is checkpointed a second time."""
    if not buffers:
        return
    more = f" and {len(buffers) - 1} more" if len(buffers) > 1 else ""
    told = (
        f"{session.model_name} writes to {buffers[0]}{more} within torch.utils.checkpoint: once in a step, where eager "
        "does so again as it recomputes in backward; leave the checkpoints out to have the same in both"
    )
    if told not in session.notes:
        log.warning("memopt: %s", told)
    session.note(told)


def tell_written_around(session: Session) -> None:
    """The same of a call that a checkpoint of the user's is around.

    It ends the recomputation as soon as it has what was saved, which is before a compiled call writes to its buffers.
    """
    if session.step is not None and in_checkpoint():
        programs = [item.program for item in session.step.planned]
        tell_written(session, [name for each in programs for name in written_in_checkpoints(each, around=True)])
