"""An independent judge of orders: walks the steps storage by storage, sharing no code with the search."""

from __future__ import annotations

from memopt.solve.order import Order, OrderError, OrderProblem


def check_order(problem: OrderProblem, order: Order) -> None:
    """Accept an order that runs every operation once, each after its predecessors, and peaks at what it claims.

    Raises:
        OrderError: it does not, or its lower bound is above its peak; the message names the step or the operation.
    """
    count = len(problem.touches)
    if sorted(order.steps) != list(range(count)):
        raise OrderError(f"the steps are no permutation of {count} operations")
    position = {operation: step for step, operation in enumerate(order.steps)}
    for operation, before in enumerate(problem.after):
        for other in before:
            if position[other] > position[operation]:
                raise OrderError(f"operation {operation} runs before operation {other}, which it comes after")
    first, last = dict[int, int](), dict[int, int]()
    for step, operation in enumerate(order.steps):
        for storage in problem.touches[operation]:
            first.setdefault(storage, step)
            last[storage] = count if storage in problem.pinned else step
    peak = 0
    for step, operation in enumerate(order.steps):
        alive = sum(problem.sizes[s] for s in first if first[s] <= step <= last[s])
        new = sum(problem.sizes[s] for s in first if first[s] == step)
        taken = problem.takes[operation] if problem.takes else -1
        if taken != -1 and first[taken] < step == last[taken] and new >= problem.sizes[taken]:
            alive -= problem.sizes[taken]
        peak = max(peak, alive + problem.workspace[operation])
    if peak != order.peak_bytes:
        raise OrderError(f"the peak is {peak} bytes, not {order.peak_bytes} as claimed")
    if order.lower_bound > peak:
        raise OrderError(f"a lower bound of {order.lower_bound} bytes is above the peak of {peak}")
