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


def attention_function() -> Any:
    """The function of C++ that `F.scaled_dot_product_attention` is, as graphs of Dynamo's call it."""
    return torch._C._nn.scaled_dot_product_attention


def convolution_library(
    values: tuple[Any, Any, Any],
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: Any,
) -> str:
    """The library that torch would have run a convolution, by its name among torch's: `Mkldnn`, `Cudnn`, `Slow2d`.

    Args:
        values: the images, the weight and the bias or None: fake tensors will do.
        stride, padding, dilation, transposed, output_padding, groups: of `aten.convolution`.
    """
    found: Any = torch._C._select_conv_backend(*values, stride, padding, dilation, transposed, output_padding, groups)
    return str(found.name)


def nnpack_enabled() -> bool:
    """Whether NNPACK may run convolutions on a CPU."""
    return bool(torch._C._get_nnpack_enabled())
