from __future__ import annotations

import os
import sys
import threading

import pytest
import torch

from memopt.step.side_by_side import side_by_side


def _squares(count):
    return [lambda number=number: (number * number, os.getpid()) for number in range(count)]


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch, request):
    if "jax" in sys.modules and "jax" not in request.node.name:
        pytest.skip("another test has loaded JAX in this process")
    if hasattr(os, "sched_getaffinity"):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)


needs_fork = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no copies of a process here")


@needs_fork
def test_results_come_in_order_from_processes_of_their_own():
    found = side_by_side(_squares(4), seconds=30)
    assert [value for value, _ in found] == [0, 1, 4, 9]
    assert found[0][1] == os.getpid() and len({process for _, process in found}) == 4
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)  # none is left


def test_no_copies_beside_jax(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", sys)
    assert {process for _, process in side_by_side(_squares(3), seconds=30)} == {os.getpid()}


@needs_fork
def test_copies_leave_no_trace_here():
    seen: list[int] = []
    assert side_by_side([lambda: seen.append(1), lambda: seen.append(2)], seconds=30) == [None, None]
    assert seen == [1]


@needs_fork
@pytest.mark.parametrize("end", [lambda: os._exit(3), lambda: threading.Event().wait(), lambda: 1 / 0])
def test_what_fails_in_a_copy_is_done_here(end):
    here = os.getpid()

    def task():
        return "done" if os.getpid() == here else end()

    assert side_by_side([task, task], seconds=0.2) == ["done", "done"]


@needs_fork
def test_without_processes_all_is_done_here(monkeypatch):
    def refused():
        raise BlockingIOError("no process")

    monkeypatch.setattr(os, "fork", refused)
    assert {process for _, process in side_by_side(_squares(3), seconds=30)} == {os.getpid()}


def test_on_one_core_or_beside_the_main_thread_nothing_is_copied(monkeypatch):
    found = []
    thread = threading.Thread(target=lambda: found.extend(side_by_side(_squares(2), seconds=30)))
    thread.start()
    thread.join()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    found += side_by_side(_squares(2), seconds=30)
    assert {process for _, process in found} == {os.getpid()}


def test_a_process_that_uses_a_gpu_is_not_copied(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert {process for _, process in side_by_side(_squares(3), seconds=30)} == {os.getpid()}


def test_errors_of_a_task_are_raised():
    with pytest.raises(ZeroDivisionError):
        side_by_side([lambda: 1, lambda: 1 / 0], seconds=30)
