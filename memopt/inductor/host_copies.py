"""How Inductor runs copies to the host and back: in the graph's order, on the very memory that the graph names."""

from __future__ import annotations

import functools
from typing import Any

from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, register_lowering
from torch._inductor.virtualized import V

from memopt.host.operators import ARRIVED, ARRIVED_INTO, FETCH, LANDED, LANDED_INTO, TO_HOST


@functools.cache
def register_host_copies() -> None:
    """Tell Inductor, once in a process, of the operators.

    What waits for a copy is told to Inductor as a write to what was copied: so nothing reads that before.
    """
    register_lowering(TO_HOST, type_promotion_kind=None)(fallback_handler(TO_HOST, add_to_fallback_set=False))  # type: ignore[no-untyped-call]
    register_lowering(FETCH, type_promotion_kind=None)(_fetch)
    register_lowering(LANDED, type_promotion_kind=None)(_landed)
    register_lowering(ARRIVED, type_promotion_kind=None)(_arrived)


def _fetch(held: Any, place: Any) -> Any:
    made: Any = ir.FallbackKernel.create(FETCH, held, place)
    # By its operand it would run on the host: the code would leave the device's context for it, and enter it again.
    made.inputs[0].layout = ir.MultiOutputLayout(device=place)
    value: Any = ir.TensorBox.create(made)
    # Inductor knows nothing of where inputs on the host lie, and takes that over for what is made of them: this is new.
    V.graph.unaligned_buffers.discard(value.get_name())
    return value


def _landed(value: Any, held: Any) -> Any:
    ir.FallbackKernel.create(LANDED_INTO, value, held)
    return held


def _arrived(value: Any, held: Any) -> Any:
    ir.FallbackKernel.create(ARRIVED_INTO, value, held)
    return value
