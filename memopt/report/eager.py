"""The report of a call that runs eagerly within a budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memopt.memory.allocator import with_slack
from memopt.memory.breakdown import MemoryBreakdown
from memopt.report.record import Environment, Report

if TYPE_CHECKING:
    from memopt.compilation.session import Session


def eager_report(session: Session, needed: int, limit: int, gradients: int, measured: int | None, plain: int) -> Report:
    """Put a call on record that runs eagerly, as there is no plan.

    Args:
        session: of the call; the graphs that it has captured stay on record.
        needed: the most bytes that the call takes, all that is resident included.
        limit: the budget in bytes.
        gradients: bytes of those that it makes.
        measured: the most bytes that a real one took; None before.
        plain: as `needed`, where nothing is recomputed.
    """
    resident, peak = session.resident, max(needed, session.optimizer_peak())
    held = resident.total - resident.outside
    scratch = 0
    if session.optimizer_peak() > needed and resident.optimizer is not None:
        scratch, gradients = resident.beside_gradients, resident.trainable
        held -= resident.gradients
    else:
        gradients = min(gradients, peak - held)
        gradients, held = gradients + resident.gradients, held - resident.gradients
    found = MemoryBreakdown(
        parameters=resident.parameters,
        buffers=resident.buffers,
        gradients=gradients,
        optimizer_state=resident.optimizer_state,
        inputs=resident.inputs,
        activations=max(0, peak - held - gradients - scratch),
        workspace=scratch + resident.libraries,
        total=peak,
        others=resident.others,
    )
    device = str(torch.cuda.get_device_name(resident.device)) if resident.device.type == "cuda" else "cpu"
    return Report(
        passes=(),
        peak_bytes=peak,
        measured_peak_bytes=measured,
        minimum_bytes=with_slack(peak, resident.device),
        budget_bytes=limit,
        unconstrained_bytes=max(plain, peak),
        breakdown=found,
        programs=() if session.report is None else session.report.programs,
        notes=tuple(session.notes),
        environment=Environment(str(torch.__version__), device, torch.get_num_threads()),
        model=session.model_name,
        backend=session.engine().name,
        seconds={} if session.report is None else session.report.seconds,
    )
