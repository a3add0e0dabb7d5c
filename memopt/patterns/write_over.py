"""An operator that is its operand, and says which value's memory an engine may compute it in."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_LIBRARY = torch.library.Library("memopt", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "write_over(Tensor base, Tensor value, Tensor[] after) -> Tensor", tags=(torch.Tag.pointwise,)
)

# `value`, which may take the place of `base` once that is read for everything in `after`; both look alike.
WRITE_OVER = torch.ops.memopt.write_over.default


def _copied(base: torch.Tensor, value: torch.Tensor, after: Sequence[torch.Tensor]) -> torch.Tensor:
    return value.clone()


def _fake(base: torch.Tensor, value: torch.Tensor, after: Sequence[torch.Tensor]) -> torch.Tensor:
    torch._check(  # type: ignore[no-untyped-call]
        base.shape == value.shape and base.dtype == value.dtype,
        lambda: f"{tuple(value.shape)} {value.dtype} does not fit over {tuple(base.shape)} {base.dtype}",
    )
    return torch.empty_like(value)


_LIBRARY.impl("write_over", _copied, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_LIBRARY.impl("write_over", _fake, "Meta")  # type: ignore[no-untyped-call]
