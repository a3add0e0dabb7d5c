"""Inputs that share memory and are written to: AOTAutograd captures the graph with their base in their place.

Two things that it knows of them it then gets wrong (seen on torch 2.13):

- An output that shows one of them is made of the base by the views that lead to it from the *input*: transposed anew
  where the input was transposed, or an error where dimensions differ.
- Where several of them that have gradients are written to, it expects a tangent for each, and the base has one.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from torch._functorch import aot_autograd as _first  # noqa: F401 (without it the next one is a circle of imports)
from torch._functorch._aot_autograd import runtime_wrappers
from torch._functorch._aot_autograd.schemas import MutationType

from memopt.torch_compat.patched import replaced

_METADATA = "create_synthetic_base_metadata"


@contextlib.contextmanager
def bases_told_rightly() -> Iterator[None]:
    """Within: such graphs are captured rightly; no setting of torch's does it. Nothing changes where it has no such."""
    plain: Any = getattr(runtime_wrappers, _METADATA, None)
    if plain is None:
        yield
        return

    def told(given: Any, bases: Sequence[Any], *args: Any) -> Any:
        made, changed = plain(given, bases, *args)
        return _corrected(given, bases, made), changed

    with replaced(runtime_wrappers, _METADATA, told):
        yield


def _corrected(given: Any, bases: Sequence[Any], made: Any) -> Any:
    """What is known of the graph with bases, corrected by what is known of the graph that was given."""
    outputs = list(made.output_info)
    for place, output in enumerate(given.output_info):
        if output.base_idx is not None and not isinstance(bases[output.base_idx], int):
            outputs[place] = dataclasses.replace(outputs[place], view_meta_sequence=None)  # by its strides, then
    before, after = _written(given), _written(made)
    tangents = {
        name: [*getattr(made, name)[:after], *getattr(given, name)[before:]]
        for name in ("traced_tangents", "traced_tangents_descs", "subclass_tangent_meta")
        if hasattr(made, name)
    }
    return dataclasses.replace(made, output_info=outputs, **tangents)


def _written(metadata: Any) -> int:
    """How many inputs have tangents of their own, as the graph returns their new values."""
    return sum(
        info.mutation_type is MutationType.MUTATED_OUT_GRAPH and info.mutates_data and info.requires_grad
        for info in metadata.input_info
    )
