"""What drawings share."""

from __future__ import annotations

import math


def round_up(value: float) -> float:
    """The least of 1, 2, 5 times a power of ten that is not below `value`, which must be positive: for axes."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value * (1 - 1e-9))
