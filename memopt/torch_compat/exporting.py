"""Exported programs: composite operators written out, and whether one is being made; tried on torch 2.11 and 2.13."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch._export.utils import _is_cia_op
from torch.export import ExportedProgram, default_decompositions
from torch.export.exported_program import _decompose_exported_program, _split_decomp_table_to_cia_and_python_decomp

_LOG = "torch.export"


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


def load_program(path: Path) -> ExportedProgram:
    """An exported program from a file.

    `torch.export.load` writes the error that it meets to its log, with a traceback, and raises one that names the log.

    Raises:
        Exception: the error that was met.
    """
    met: list[BaseException] = []

    def kept_back(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        met.extend([] if error is None else [error])
        return error is None

    log = logging.getLogger(_LOG)
    log.addFilter(kept_back)
    try:
        return torch.export.load(path)
    except Exception as error:
        raise (met[0] if met else error) from None
    finally:
        log.removeFilter(kept_back)


def is_exporting() -> bool:
    """Whether `torch.export` traces, also as Dynamo traces this: in torch 2.11 it takes torch's own function for true.

    Tried on torch 2.11 and 2.13.
    """
    return bool(torch.compiler._is_exporting_flag)
