"""Exported programs: composite operators written out, and whether one is being made; tried on torch 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._export.utils import _is_cia_op
from torch.export import ExportedProgram, default_decompositions
from torch.export.exported_program import _decompose_exported_program, _split_decomp_table_to_cia_and_python_decomp


def composites() -> dict[Any, Callable[..., Any]]:
    """Composite operators, each with its decomposition or torch.export's mark of those that it keeps whole."""
    table = default_decompositions()
    found: dict[Any, Callable[..., Any]] = _split_decomp_table_to_cia_and_python_decomp(
        {op: table[op] for op in list(table) if _is_cia_op(op)}
    )[0]
    return found


def written_out(exported: ExportedProgram, decompositions: Mapping[Any, Callable[..., Any]]) -> ExportedProgram:
    """The program with these composite operators written out, and those that torch decomposes by itself."""
    return _decompose_exported_program(  # type: ignore[no-any-return]
        exported,
        cia_to_decomp=dict(decompositions),
        python_decomp_table={},
        joint_loss_index=None,
        decompose_custom_triton_ops=False,
    )


def is_exporting() -> bool:
    """Whether `torch.export` traces, also as Dynamo traces this: in torch 2.11 it takes torch's own function for true.

    Tried on torch 2.11 and 2.13.
    """
    return bool(torch.compiler._is_exporting_flag)
