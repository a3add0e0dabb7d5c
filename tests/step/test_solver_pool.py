from __future__ import annotations

import os
import subprocess
import sys

import pytest

from memopt.solve.problem import StepProblem
from memopt.solve.solver_worker import Job
from memopt.step import solver_pool
from memopt.step.solver_pool import Searches


def _chain(length, size=100):
    """A chain of operations and its backward, each of which reads what forward made."""
    forward = [((i - 1,) if i else (), (i,)) for i in range(length)]
    backward = [((length - 1 - i, *((length + i - 1,) if i else ())), (length + i,)) for i in range(length)]
    reads, writes = zip(*forward, *backward, strict=True)
    count = 2 * length
    return StepProblem(
        sizes=(size,) * count,
        reads=reads,
        writes=writes,
        costs=(1.0,) * count,
        workspace=(0,) * count,
        forward=length,
        recomputable=(True,) * count,
        pinned=frozenset({count - 1}),
        resident=frozenset(),
    )


@pytest.fixture(autouse=True)
def _brief_searches():
    """A process of its own searches as long as ever: so does this one."""


@pytest.fixture(autouse=True)
def cores(monkeypatch):
    """How many cores there are, in a list that a test may change."""
    found = [3]
    monkeypatch.setattr(solver_pool, "_cores", lambda: found[0])
    monkeypatch.setattr(solver_pool, "_FEW", 0)
    monkeypatch.setattr(solver_pool, "_START", 300.0)  # on a busy machine a process is not there at once
    return found


@pytest.fixture
def here(monkeypatch):
    """What is searched in this process."""
    seen, plain = [], solver_pool.searched

    def searched(jobs):
        seen.append(jobs)
        return plain(jobs)

    monkeypatch.setattr(solver_pool, "searched", searched)
    return seen


def test_curves_come_in_order_and_are_those_of_a_search_here(here):
    jobs = [[Job(_chain(length), 2.0)] for length in (4, 6, 8)]
    with Searches() as searches:
        begun = [searches.begin(job) for job in jobs]
        assert [item.apart for item in begun] == [True, True, True]
        found = [item.curves() for item in begun]
    assert not here
    assert found == [solver_pool.searched(job) for job in jobs]
    assert [len(curve.points[0].schedule.steps) for (curve,) in found] == [8, 12, 16]


def test_the_process_imports_no_torch(tmp_path):
    worker = solver_pool._WORKER.replace("serve()", "print('torch' in sys.modules)")
    folder = os.path.dirname(os.path.dirname(solver_pool.__file__))
    done = subprocess.run([sys.executable, "-I", "-S", "-c", worker, folder, *sys.path], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def test_what_has_no_core_is_searched_here(here, cores):
    with Searches() as searches:
        begun = [searches.begin([Job(_chain(4), 1.0)]) for _ in range(4)]
        assert [item.apart for item in begun] == [True, True, True, False] and not searches.more(1)
        assert begun[3].curves() and len(here) == 1
    cores[0] = 1
    with Searches() as searches:
        assert not searches.begin([Job(_chain(4), 1.0)]).apart


def test_a_small_problem_is_searched_here(monkeypatch, here):
    monkeypatch.setattr(solver_pool, "_FEW", 300)
    with Searches() as searches:
        assert not searches.begin([Job(_chain(4), 1.0)]).apart
        assert searches.begin([Job(_chain(151), 1.0)]).apart


@pytest.mark.parametrize("worker", ["raise SystemExit(3)", "print('not a curve')", "import time; time.sleep(600)"])
def test_what_fails_in_a_process_is_done_here(monkeypatch, here, worker):
    monkeypatch.setattr(solver_pool, "_WORKER", worker)
    monkeypatch.setattr(solver_pool, "_START", 0.2)
    monkeypatch.setattr(solver_pool, "_PATIENCE", 0.1)
    with Searches() as searches:
        (curve,) = searches.begin([Job(_chain(4), 1.0)]).curves()
    assert curve.points and len(here) == 1


def test_without_processes_all_is_done_here(monkeypatch, here):
    def refused(*args, **options):
        raise BlockingIOError("no process")

    monkeypatch.setattr(subprocess, "Popen", refused)
    with Searches() as searches:
        begun = searches.begin([Job(_chain(4), 1.0)])
        assert not begun.apart and begun.curves() and len(here) == 1


def test_leaving_ends_what_still_runs():
    with pytest.raises(KeyboardInterrupt), Searches() as searches:
        begun = searches.begin([Job(_chain(2000), 600.0)])
        process = begun._process
        assert process.poll() is None
        raise KeyboardInterrupt
    assert process.poll() is not None and not begun.apart
