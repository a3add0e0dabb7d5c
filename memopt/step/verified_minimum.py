"""The verified minimum: what a refusal names, kept by a trial step first, and known to who then asks for it.

Code says what tensors take, not what the allocator holds beside them: a figure that no step has kept is no promise.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from memopt.budget import Budget, BudgetError, format_bytes
from memopt.common.progress import stage
from memopt.memory.cost.disk import Store
from memopt.program import Program
from memopt.step.keys import step_facts, versions

if TYPE_CHECKING:
    from memopt.compilation.session import Session

log = logging.getLogger("memopt")

# How many minimums are verified; each is at least the one before plus that / _FURTHER.
_NAMINGS, _FURTHER = 4, 256
# A verified minimum serves budgets up to minimum / _NEAR above it: larger ones deserve a search of their own.
_NEAR = 25
_MOST = 1 << 50


def verified(session: Session, refused: BudgetError, lower: Callable[[], Program | None]) -> BudgetError:
    """The refusal, naming a minimum that a trial step has kept; unchanged if the device cannot tell.

    Args:
        session: whose step was refused.
        refused: names what is tried first.
        lower: lowers the step for the budget that is the session's then, takes it, and returns what it was captured as;
            None where no step could be taken, so that nothing was seen.
    """
    device = session.resident.device
    for _ in range(_NAMINGS):
        size = refused.minimum_bytes
        if device.type == "cuda" and size > torch.cuda.get_device_properties(device).total_memory:
            break
        log.info("a minimum of %d bytes is verified by a trial step", size)
        with _asked_for(session, size):
            try:
                program = lower()
            except BudgetError as error:
                more = max(error.minimum_bytes, size + size // _FURTHER)
            else:
                if program is not None:  # else it stays a figure of what code takes
                    VerifiedMinimums().put(session, program, size)
                break
        refused = BudgetError(more, refused.budget_bytes, refused.breakdown, beside=refused.beside)
    return refused


@contextlib.contextmanager
def _asked_for(session: Session, size: int) -> Iterator[None]:
    """Within, the budget is `size` bytes, and the deepest plan comes first; nothing of it stays."""
    stage("verifying the minimum by a trial step")
    kept = session.budget, session.capture_reserve.wanted, session.beyond
    session.budget, session.naming = Budget(size, None, format_bytes(size, short=True)), True
    before = session.tighten(-session.margin)
    try:
        yield
    finally:
        if session.graph_pool is not None:
            session.graph_pool.release()
        session.loosen(before)
        session.forget_plan()
        session.budget, wanted, session.beyond = kept
        session.capture_reserve.want(wanted)
        session.naming = False


class VerifiedMinimums:
    """The verified minimums by step, for this version of memopt and torch: below the folder for caches.

    What is read is a proposal: the code that comes of it is judged as any other.
    """

    def __init__(self) -> None:
        """Nothing is read or made yet."""
        self._store = Store("named")

    def near(self, session: Session, program: Program) -> int | None:
        """The least in bytes that was named for the step, where the session's budget is that or a little more."""
        budget = None if session.budget is None or session.margin else session.budget.bytes
        record = self._store.get(versions(), _key(session, program))
        least = None if record is None else record.get("minimum_bytes")
        if budget is None or type(least) is not int or not 0 < least <= _MOST:
            return None
        return least if least <= budget <= least + least // _NEAR else None

    def put(self, session: Session, program: Program, least: int) -> bool:
        """Keep what was named, in bytes; return whether it was written."""
        return self._store.put(versions(), _key(session, program), {"minimum_bytes": least})


def _key(session: Session, program: Program) -> str:
    return json.dumps(step_facts(session, program), sort_keys=True)
