"""Processes that are prepared side by side and timed one at a time, with all others stopped."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from memopt.common.cores import cores as _cores
from memopt.comparison.job import Job
from memopt.comparison.processes import Worker, WorkerFailed, device_used
from memopt.torch_compat.inductor_files import files_by_default

# The same allocator for all rows, and the one that memopt's budgets are kept with.
ALLOCATOR = "expandable_segments:True"
# What a device that has no memory left makes PyTorch, memopt and XLA say.
_NO_MEMORY = ("out of memory", "OutOfMemory", "RESOURCE_EXHAUSTED")
# Seconds for the timing of a row that was ready when the time for everything was over.
_GRACE = 60.0
# Seconds for which a process may be alone before others go on: it may wait for what one of them has.
_ALONE = 30.0


class Pool:
    """Up to so many processes at once; a process that is ready is timed while the others are stopped.

    One that finds no memory beside the others is run once more, alone.
    """

    def __init__(
        self,
        folder: Path,
        timeout: float,
        keep_caches: bool,
        jobs: int,
        seconds: float | None,
        *,
        shared_caches: bool = False,
    ) -> None:
        """`timeout` is for what one process is asked for, `seconds` for all together; see `compare`.

        With `shared_caches` compilers find what the pool's other processes left, and nothing else.
        """
        self.folder, self.timeout, self.keep_caches, self.jobs = folder, timeout, keep_caches, max(1, jobs)
        self._shared = folder / "shared" if shared_caches else None
        self._seconds, self._end = seconds, None if seconds is None else time.monotonic() + seconds
        self._waiting: deque[tuple[int, Job]] = deque()
        self._alone: deque[tuple[int, Job]] = deque()
        self._running: dict[int, tuple[Job, Worker]] = {}
        self._beside: set[int] = set()  # have run beside others
        self._short: dict[int, str] = {}  # what those said that found no memory beside others
        self._ready: dict[int, dict[str, Any]] = {}  # wait for their turn
        self._added = self._started = 0

    def add(self, jobs: Sequence[Job], *, ahead: bool = False) -> list[int]:
        """Let jobs be done, after those that are waiting, or ahead of them. Returns their numbers."""
        numbers = list(range(self._added, self._added + len(jobs)))
        pairs = list(zip(numbers, jobs, strict=True))
        self._waiting = deque([*pairs, *self._waiting] if ahead else [*self._waiting, *pairs])
        self._added += len(jobs)
        return numbers

    def run(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Each job's number and what its process said in the end, as soon as it did; jobs may be added meanwhile."""
        try:
            while self._waiting or self._alone or self._running:
                if self._end is not None and time.monotonic() > self._end:
                    yield from self._left()
                    return
                self._start()
                for number, (job, worker) in list(self._running.items()):
                    said = self._heard(number, worker)
                    if said is None:
                        continue
                    self._ended(number)
                    if number in self._beside and any(word in said.get("reason", "") for word in _NO_MEMORY):
                        self._beside.discard(number)
                        self._short[number] = said["reason"]
                        self._alone.append((number, job))
                    else:
                        yield number, said
                time.sleep(0.02)
        finally:
            for _, worker in self._running.values():
                worker.end()

    def _start(self) -> None:
        while self._waiting and len(self._running) < self.jobs:
            number, job = self._waiting.popleft()
            self._running[number] = (job, self._worker(job))
        if self._alone and not self._running:
            number, job = self._alone.popleft()
            self._running[number] = (job, self._worker(job))
        elif len(self._running) > 1:
            self._beside.update(self._running)

    def _left(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """What is ready is timed, now that there is nothing else; all the rest is late."""
        late = f"not ready within the {self._seconds:g} s that there were for everything"
        for number, (_, worker) in list(self._running.items()):
            said = self._ready.get(number) or self._said(worker)
            if said is None or said["kind"] in ("alone", "beside"):
                self._ended(number)
                yield number, {"kind": "row", "reason": late}
            else:
                self._ready[number] = said
        for number, (_, worker) in list(self._running.items()):
            said = self._heard(number, worker)
            assert said is not None  # nobody else has the turn
            self._ended(number)
            yield number, said
        while self._alone or self._waiting:
            number, _ = (self._alone or self._waiting).popleft()
            why = f"{late}, alone; beside others: {self._short[number]}" if number in self._short else late
            yield number, {"kind": "row", "reason": why}

    def _ended(self, number: int) -> None:
        _, worker = self._running.pop(number)
        worker.end()

    def _said(self, worker: Worker) -> dict[str, Any] | None:
        try:
            return worker.heard()
        except WorkerFailed as error:
            return {"kind": "row", "reason": str(error)}

    def _heard(self, number: int, worker: Worker) -> dict[str, Any] | None:
        try:
            said = self._ready.pop(number, None) or self._said(worker)
            if said is None or said["kind"] == "row":
                return said
            if said["kind"] == "beside":  # it was alone for too long
                worker.go()
                return None
            with self._turn() as has_turn:
                if not has_turn:
                    self._ready[number] = said
                    return None
                if said["kind"] == "alone":
                    self._leave_alone(number, worker, said["device"])
                    return None
                said = self._timed(number, worker, said["device"])
        except WorkerFailed as error:
            return {"kind": "row", "reason": str(error)}
        return said

    @contextlib.contextmanager
    def _turn(self) -> Iterator[bool]:
        """Whether no process has much to do on the device, and keep it so: what was queued there is not stopped."""
        with (self.folder / "turn").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    def _timed(self, number: int, worker: Worker, device: str) -> dict[str, Any]:
        """Let a prepared process be timed, and see what the device gets back when it ends."""
        with self._quiet(number, device):
            remaining = self.timeout if self._end is None else self._end - time.monotonic()
            worker.go(min(self.timeout, max(_GRACE, remaining)))
            while (said := worker.expect())["kind"] != "row":
                worker.go()  # it is alone already
            held = device_used(device)
            worker.end()
            left = device_used(device, after=0.2)
        if held is None or left is None or "reason" in said:
            return said
        known = held - left > (said.get("reserved_bytes") or 0)  # else others let go of something meanwhile
        return {**said, "process_bytes": held - left if known else None}

    def _leave_alone(self, number: int, worker: Worker, device: str) -> None:
        """Let a process run by itself until it says that others may go on."""
        with self._quiet(number, device):
            worker.go()
            if worker.heard(_ALONE) is not None:
                worker.go()

    @contextlib.contextmanager
    def _quiet(self, number: int, device: str) -> Iterator[None]:
        others = [worker for other, (_, worker) in self._running.items() if other != number]
        for worker in others:
            worker.stop()
        try:
            if device and others:
                time.sleep(0.2)  # what they gave the device is done first
            yield
        finally:
            for worker in others:
                worker.go_on()

    def _worker(self, job: Job) -> Worker:
        self._started += 1
        name = f"{self._started:03}"
        own = self.folder / f"own-{name}"
        (own / "tmp").mkdir(parents=True)
        environment = {"PYTORCH_CUDA_ALLOC_CONF": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ALLOCATOR)}
        environment["TMPDIR"] = str(own / "tmp")  # a process that is ended leaves what it wrote
        environment["KINETO_LOG_LEVEL"] = "99"  # the profiler's own lines
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # or its figures would be three quarters of the device
        if self.jobs > 1:  # or each of them would start a compiler per core
            threads = max(1, 2 * _cores() // self.jobs)
            environment["TORCHINDUCTOR_COMPILE_THREADS"] = str(threads)
        if self.keep_caches:
            environment["TORCHINDUCTOR_CACHE_DIR"] = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or files_by_default()
        else:
            caches = self._shared or own
            environment["TORCHINDUCTOR_CACHE_DIR"] = str(caches / "inductor")
            environment["TRITON_CACHE_DIR"] = str(caches / "triton")
            environment["MEMOPT_CACHE_DIR"] = str(caches / "memopt")
        turn = str(self.folder / "turn") if self.jobs > 1 else ""
        return Worker(dataclasses.replace(job, turn=turn), self.folder, name, self.timeout, environment)
