"""Sums of matrix products in float32: an operator that adds a product of half precision to the sum where that stands.

ATen's `addmm` adds in the precision of its factors, or beside the sum so far. A gradient that is a sum over chunks
would then be rounded for each chunk, or take its own size once more while it grows.
"""

from __future__ import annotations

import torch
from torch.utils.flop_counter import register_flop_formula

from memopt.patterns.rows import HALVES

aten = torch.ops.aten

_LIBRARY = torch.library.Library("memopt", "DEF")  # type: ignore[no-untyped-call]
for _schema in (
    "wide_product(Tensor left, Tensor right) -> Tensor",
    "add_product(Tensor total, Tensor left, Tensor right) -> Tensor",
    "add_product_(Tensor(a!) total, Tensor left, Tensor right) -> Tensor(a!)",
    "add_product_into(Tensor(a!) total, Tensor left, Tensor right) -> ()",
):
    _LIBRARY.define(_schema)  # type: ignore[no-untyped-call]

# left [m, k] · right [k, n] in float32: what a sum begins with.
WIDE_PRODUCT = torch.ops.memopt.wide_product.default
# total [m, n] + left [m, k] · right [k, n], in total's precision: by itself, over total, and over total for Inductor,
# which calls no operator of another namespace than ATen's that returns what it has written.
ADD_PRODUCT = torch.ops.memopt.add_product.default
ADD_PRODUCT_OVER = torch.ops.memopt.add_product_.default
ADD_PRODUCT_INTO = torch.ops.memopt.add_product_into.default


# Since then `addmm` adds a product of half precision to a matrix in float32.
_SUMS_IN_FLOAT32 = (2, 10)


def in_float32(factor: torch.Tensor) -> bool:
    """Whether it is of half precision, on a device that multiplies such matrices with a result in float32: NVIDIA's."""
    if factor.dtype not in HALVES or factor.device.type != "cuda" or torch.version.hip:
        return False
    if torch.__version__ < _SUMS_IN_FLOAT32:  # type: ignore[operator]
        return False
    if factor.dtype is torch.float16 or not torch.cuda.is_available():  # a plan for a device that is not here
        return True
    return torch.cuda.get_device_capability(factor.device) >= (8, 0)


def _wide(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if in_float32(left):
        return aten.mm.dtype(left, right, torch.float32)  # type: ignore[no-any-return]
    return torch.mm(left.float(), right.float())


def _over(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if left.dtype == total.dtype:
        return total.addmm_(left, right)
    if in_float32(left) and total.dtype is torch.float32:
        aten.addmm.dtype_out(total, left, right, total.dtype, out=total)
        return total
    return total.addmm_(left.to(total.dtype), right.to(total.dtype))


def _into(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    _over(total, left, right)


def _apart(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return _over(total.clone(), left, right)


def _fake_wide(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.mm(left, right).float()


def _fake(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    torch._check(  # type: ignore[no-untyped-call]
        left.dim() == right.dim() == 2 and total.shape == (left.shape[0], right.shape[1]),
        lambda: f"{tuple(left.shape)} by {tuple(right.shape)} cannot be added to {tuple(total.shape)}",
    )
    return torch.empty_like(total)


def _fake_over(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return total


def _fake_into(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    return None


for _name, _kernel, _meta in (
    ("wide_product", _wide, _fake_wide),
    ("add_product", _apart, _fake),
    ("add_product_", _over, _fake_over),
    ("add_product_into", _into, _fake_into),
):
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    _LIBRARY.impl(_name, _meta, "Meta")  # type: ignore[no-untyped-call]


def _flops(*shapes: tuple[int, ...], **_: object) -> int:
    left, right = shapes[-2:]
    return 2 * left[0] * left[1] * right[1]


for _packet in (torch.ops.memopt.wide_product, torch.ops.memopt.add_product):
    register_flop_formula(_packet)(_flops)
