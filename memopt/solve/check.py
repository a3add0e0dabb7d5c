"""An independent judge of schedules: walks the steps, copy by copy, sharing no code with the simulator."""

from __future__ import annotations

from memopt.solve.problem import StepProblem
from memopt.solve.schedule import Schedule, ScheduleError


def check(problem: StepProblem, schedule: Schedule, peak_bytes: int, limit: int | None = None) -> None:
    """Accept a schedule that runs, does the whole step, and peaks at exactly `peak_bytes`, at or below `limit` bytes.

    Raises:
        ScheduleError: it does not; the message names the step, the operation and the storage.
    """
    steps, forward = schedule.steps, problem.forward
    if schedule.forward != forward or steps[:forward] != tuple(range(forward)):
        raise ScheduleError("forward order changed: the first steps must be the forward operations in order")
    if wrong := set(steps) ^ set(range(len(problem.reads))):
        raise ScheduleError(f"missing or unknown operations: {sorted(wrong)}")
    coming: dict[int, list[str]] = {}  # storage → what touches it, the earliest touch last
    for operation in reversed(steps):
        for kind, storages in (("write", problem.writes[operation]), ("read", problem.reads[operation])):
            for storage in storages:
                coming.setdefault(storage, []).append(kind)
    written = set(problem.resident)
    done, firsts, total, peak = set[int](), set[int](), 0, 0  # firsts: pinned storages whose latest copy is the first
    for step, operation in enumerate(steps):
        if operation in done and not problem.recomputable[operation]:
            raise ScheduleError(f"step {step} runs operation {operation} again, which must not be recomputed")
        if step == forward:
            written |= problem.arriving
            total += sum(problem.sizes[storage] for storage in problem.arriving)
        for storage in problem.reads[operation]:
            if storage not in written:
                raise ScheduleError(f"step {step} (operation {operation}) reads storage {storage} before it is written")
        for storage in problem.writes[operation]:
            firsts.discard(storage) if operation in done else firsts.update({storage} & problem.pinned)
            written.add(storage)
            total += problem.sizes[storage]
        done.add(operation)
        peak = max(peak, total + problem.workspace[operation])
        for storage in {*problem.reads[operation], *problem.writes[operation]} - problem.resident - problem.arriving:
            coming[storage].pop()
            if coming[storage][-1:] != ["read"]:
                total -= 0 if storage in firsts else problem.sizes[storage]
    if peak != peak_bytes:
        raise ScheduleError(f"the peak is {peak} bytes, not {peak_bytes} as claimed")
    if limit is not None and peak > limit:
        raise ScheduleError(f"the peak of {peak} bytes is over the limit of {limit} bytes")
