"""An independent check of which values wait on the host: the link is played through, copy by copy."""

from __future__ import annotations

from collections.abc import Sequence

from memopt.solve.offload import Offload, Trip

# Sums of seconds in another order differ by rounding.
_ROUNDING = 1e-9


def check(problem: Offload, chosen: Sequence[Trip]) -> None:
    """Play the copies in the order in which they begin, one at a time each way.

    Raises:
        ValueError: something would be waited for, or read before it is there; the message says what.
    """
    values = [problem.values[trip.value] for trip in chosen]
    if len({trip.value for trip in chosen}) < len(chosen) or sum(value.size for value in values) > problem.limit:
        raise ValueError("a value waits twice, or more waits than may")
    for trip, value in zip(chosen, values, strict=True):
        if not {trip.leaves, trip.landed} <= {*problem.leaving} or trip.returns not in problem.coming:
            raise ValueError(f"value {trip.value} travels at a place where nothing may begin")
        if not (value.made < trip.leaves < trip.landed and value.last < trip.landed and trip.returns < value.needed):
            raise ValueError(f"value {trip.value} is not there when it is read or sent")
    done = 0.0
    for trip in sorted(chosen, key=lambda trip: trip.leaves):
        begins = max(done, sum(problem.forward[: trip.leaves]))
        done = begins + problem.values[trip.value].size / problem.to_host
        if done > sum(problem.forward[: trip.landed]) + _ROUNDING:
            raise ValueError(f"value {trip.value} has not landed where its memory is taken")
    done = 0.0
    for trip in sorted(chosen, key=lambda trip: (trip.returns, problem.values[trip.value].needed)):
        value = problem.values[trip.value]
        done = max(done, sum(problem.backward[: trip.returns])) + value.size / problem.from_host
        if done > sum(problem.backward[: value.needed]) + _ROUNDING:
            raise ValueError(f"value {trip.value} is not back where it is needed")
