"""The bytes alive at each step, of when each thing is made, when it is let go of, and what it takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def profile(steps: int, spans: Sequence[tuple[int, int, int]] | Ints) -> Ints:
    """Return the bytes alive at each of `steps` steps, workspace left out.

    Args:
        steps: how many.
        spans: of each thing, in any order, the first step at which it is alive, the first after that at which it is no
            more, and its bytes. What is let go of behind the last step stays; what begins there counts nowhere.
    """
    born, gone, sizes = np.asarray(spans, dtype=np.int64).reshape(-1, 3).T
    change = np.zeros(steps + 1, dtype=np.int64)
    np.add.at(change, np.minimum(born, steps), sizes)
    np.subtract.at(change, np.minimum(gone, steps), sizes)
    return change[:steps].cumsum()
