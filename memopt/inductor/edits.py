"""How memopt edits every graph that Inductor lowers, of training or inference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from memopt.graph.targets import draws
from memopt.inductor.masked_writes import choose_by_masks
from memopt.inductor.own_memory import keep_memory, keep_operands, keep_shared
from memopt.inductor.own_reads import keep_reads
from memopt.inductor.strided_views import as_it_lies, copy_bases
from memopt.program import draws_numbers
from memopt.step.keys import versions
from memopt.torch_compat.cat_layout import keep_cat_layout
from memopt.torch_compat.distinct_draws import keep_draws_apart
from memopt.torch_compat.draw_order import keep_draw_order
from memopt.torch_compat.joint_pass import (
    after_joint_passes,
    before_joint_passes,
    before_lowering,
    before_passes_of_graphs,
)
from memopt.torch_compat.renamed_reads import keep_renamed_reads


def edits(first: Callable[[fx.Graph], None]) -> dict[str, Any]:
    """Inductor's settings with which graphs are edited; its cache keeps code of them by memopt's version.

    Args:
        first: a module's function, which edits a graph before Inductor's own passes and notes its outputs' memory.
    """
    keep_renamed_reads()
    keep_cat_layout()
    keep_draw_order(draws_numbers)
    keep_draws_apart(draws)
    made_by = versions()
    return {
        **before_joint_passes(first, made_by),
        **after_joint_passes(_edit_last, made_by),
        **before_passes_of_graphs(copy_bases, made_by),
        **before_lowering(_edit_for_lowering, made_by),
    }


def _edit_last(graph: fx.Graph) -> None:
    keep_memory(graph)
    keep_reads(graph)


def _edit_for_lowering(graph: fx.Graph) -> None:
    choose_by_masks(graph)
    keep_shared(graph)
    as_it_lies(graph)
    keep_operands(graph)
