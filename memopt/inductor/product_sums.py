"""How Inductor runs sums of matrix products: over the sum so far, wherever nothing else reads that."""

from __future__ import annotations

import functools
from typing import Any

from memopt.patterns.product_sums import ADD_PRODUCT, ADD_PRODUCT_INTO, ADD_PRODUCT_OVER, WIDE_PRODUCT
from memopt.torch_compat.inductor_lowering import call, lower_as_call, lower_by, writes_over


@functools.cache
def register_product_sums() -> None:
    """Tell Inductor, once in a process, of the operators, and of the form that writes over the sum.

    Operators that it does not know are given copies of operands whose rows it has padded: these take them as they are.
    """
    writes_over(ADD_PRODUCT, ADD_PRODUCT_OVER, 0)
    lower_by(ADD_PRODUCT_OVER, _over)
    for known in (WIDE_PRODUCT, ADD_PRODUCT):
        lower_as_call(known)


def _over(total: Any, left: Any, right: Any) -> Any:
    total.realize()
    call(ADD_PRODUCT_INTO, total, left, right)
    return total
