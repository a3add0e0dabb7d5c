"""A backward of an `autograd.Function` that is traced with contiguous gradients, where the function has returned None.

Dynamo makes all gradients contiguous once a backward asks for the strides of one, and fails at what has none (2.13).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch._dynamo import _trace_wrapped_higher_order_op as traced

from memopt.torch_compat.patched import replaced

_NAME = "autograd_function_backward_rewritten"


def none_has_no_gradient() -> contextlib.AbstractContextManager[None]:
    """Within: such a backward gets None for an output that is None, as eager's does; tried on torch 2.13."""
    return replaced(traced, _NAME, _contiguous) if hasattr(traced, _NAME) else contextlib.nullcontext()


def _contiguous(backward: Callable[..., Any]) -> Callable[..., Any]:
    def called(ctx: Any, *gradients: Any) -> Any:
        given = [each if each is None else each.contiguous() for each in gradients]
        return backward(ctx, *given)

    return called
