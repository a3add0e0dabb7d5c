"""How the program of a seed is compiled."""

from __future__ import annotations

import random
from typing import Any

BUDGETS = (None, None, None, None, 1.0, 0.8)
USERS_BUDGETS = (None, None, 0.95, 0.85, 0.75, 0.6)
VERIFY = (*(False,) * 7, True, "full")


def settings(seed: int, loops: str = "training") -> tuple[Any, Any]:
    """The budget and what is verified; a fraction that is too small makes way for the least that its refusal names."""
    rng = random.Random(f"settings of {seed}")
    return rng.choice(USERS_BUDGETS if loops == "users" else BUDGETS), rng.choice(VERIFY)
