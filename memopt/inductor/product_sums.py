"""How Inductor runs sums of matrix products: over the sum so far, wherever nothing else reads that."""

from __future__ import annotations

import functools
from typing import Any

from torch._inductor import ir
from torch._inductor.fx_passes.reinplace import InplaceableOp, inplaceable_ops
from torch._inductor.lowering import fallback_handler, register_lowering

from memopt.patterns.product_sums import ADD_PRODUCT, ADD_PRODUCT_INTO, ADD_PRODUCT_OVER, WIDE_PRODUCT


@functools.cache
def register_product_sums() -> None:
    """Tell Inductor, once in a process, of the operators, and of the form that writes over the sum.

    Operators that it does not know are given copies of operands whose rows it has padded: these take them as they are.
    """
    inplaceable_ops[ADD_PRODUCT] = InplaceableOp(ADD_PRODUCT_OVER, 0)
    register_lowering(ADD_PRODUCT_OVER, type_promotion_kind=None)(_over)
    for known in (WIDE_PRODUCT, ADD_PRODUCT):
        register_lowering(known, type_promotion_kind=None)(fallback_handler(known, add_to_fallback_set=False))  # type: ignore[no-untyped-call]


def _over(total: Any, left: Any, right: Any) -> Any:
    total.realize()
    ir.FallbackKernel.create(ADD_PRODUCT_INTO, total, left, right)
    return total
