"""Operators as nodes of a graph call them: their types, their schemas, their names; tried on torch 2.11 and 2.13."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload


def schema_of(overload: Any) -> torch.FunctionSchema:
    """An overload's schema: its name, what it takes and returns, whether it writes to what it is given."""
    schema: torch.FunctionSchema = overload._schema
    return schema


def operator_name(target: Any) -> str:
    """An overload's name without its namespace and its overload's name, `add` of `aten.add.Tensor`; else empty."""
    return str(getattr(target, "_opname", ""))


def overload_name(overload: Any) -> str:
    """What an overload is called among those of its operator, `Tensor` of `aten.add.Tensor`."""
    return str(overload._overloadname)
