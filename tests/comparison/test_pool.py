"""Who may use the device while a row is timed, and what is done when time is over."""

import pytest

from memopt.comparison.job import Job, Source
from memopt.comparison.pool import Pool

JOB = Job(Source(), "eager", True, "cpu")


class Said:
    """A process that says these things, and then nothing."""

    def __init__(self, *said):
        self.said, self.did = list(said), []

    def heard(self, seconds=0.0):
        return self.said.pop(0) if self.said else None

    expect = heard

    def __getattr__(self, name):
        return lambda *args: self.did.append(name)


def test_no_row_is_timed_while_another_process_has_much_to_do(tmp_path):
    pools = [Pool(tmp_path, 10, True, 2, None) for _ in range(2)]
    with pools[0]._turn() as first, pools[1]._turn() as second:
        assert first and not second
    with pools[1]._turn() as again:
        assert again


def test_nothing_to_do_ends_at_once(tmp_path):
    assert list(Pool(tmp_path, 10, True, 1, 0.0).run()) == []


def test_what_is_ready_when_time_is_over_is_timed_and_the_rest_is_late(tmp_path, monkeypatch):
    ready = Said({"kind": "ready", "device": ""}, {"kind": "row", "seconds": [1.0]})
    slow, done = Said(), Said({"kind": "row", "reason": "refused"})
    pool, workers = Pool(tmp_path, 10, False, 3, 60.0), iter((ready, slow, done))
    monkeypatch.setattr(pool, "_worker", lambda job: next(workers))
    pool.add([JOB] * 4)
    pool._start()
    pool._end = 0.0  # long ago
    found = dict(pool.run())
    late = "not ready within the 60 s that there were for everything"
    assert [found[number].get("reason") for number in range(4)] == [None, late, "refused", late]
    assert found[0]["seconds"] == [1.0]
    assert slow.did == ["end"] and ready.did[0] == "go" and "end" in done.did


@pytest.mark.parametrize(("after", "process_bytes"), [(300, 700), (950, None), (1400, None)])
def test_what_a_process_held_is_not_known_where_others_let_go_of_theirs(tmp_path, monkeypatch, after, process_bytes):
    """What the device holds before and after the process ends: never less than the process itself had reserved."""
    held = iter((1000, after))
    monkeypatch.setattr("memopt.comparison.pool.device_used", lambda *_, **__: next(held))
    worker = Said({"kind": "row", "seconds": [1.0], "reserved_bytes": 100})
    said = Pool(tmp_path, 10, True, 1, None)._timed(0, worker, "cuda")
    assert said["process_bytes"] == process_bytes and said["reserved_bytes"] == 100


def test_jobs_may_go_ahead_of_those_that_wait(tmp_path, monkeypatch):
    pool, begun = Pool(tmp_path, 10, False, 1, None), []

    def worker(job):
        begun.append(job.engine)
        return Said({"kind": "row"})

    monkeypatch.setattr(pool, "_worker", worker)
    jobs = [Job(Source(), name, True, "cpu") for name in ("compile", "eager", "aten", "static")]
    assert pool.add(jobs[:2]) == [0, 1]
    for number, _ in pool.run():
        if number == 0:
            assert pool.add(jobs[2:], ahead=True) == [2, 3]
    assert begun == ["compile", "aten", "static", "eager"]


def test_caches_of_a_pool_are_each_processes_own_or_shared_by_all(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr("memopt.comparison.pool.Worker", lambda *args: given.append(args[-1]))
    apart, together = (Pool(tmp_path, 10, False, 1, None, shared_caches=shared) for shared in (False, True))
    for pool in (apart, apart):
        pool._worker(JOB)
    together._started = 2
    for pool in (together, together):
        pool._worker(JOB)
    first, second, third, fourth = (environment["MEMOPT_CACHE_DIR"] for environment in given)
    assert first != second and third == fourth == str(tmp_path / "shared" / "memopt")


def test_what_decides_by_time_runs_alone_and_goes_on(tmp_path, monkeypatch):
    said = ("alone", "beside", "alone", "ready", "alone", "beside", "row")
    chooses = Said(*({"kind": kind, "device": ""} for kind in said))
    slow = Said(None, None, None, None, None, {"kind": "row"})
    pool, workers = Pool(tmp_path, 10, False, 2, None), iter((chooses, slow))
    monkeypatch.setattr(pool, "_worker", lambda job: next(workers))
    pool.add([JOB] * 2)
    assert [number for number, _ in pool.run()] == [0, 1]
    assert chooses.did.count("go") == 6 and slow.did[:2] == ["stop", "go_on"]


def test_what_is_alone_when_time_is_over_is_late(tmp_path, monkeypatch):
    pool = Pool(tmp_path, 10, False, 1, 60.0)
    monkeypatch.setattr(pool, "_worker", lambda job: Said({"kind": "alone", "device": ""}))
    pool.add([JOB])
    pool._start()
    pool._end = 0.0
    assert [said["reason"][:9] for _, said in pool.run()] == ["not ready"]


def test_who_found_no_memory_beside_others_and_had_no_time_alone_says_so(tmp_path, monkeypatch):
    short, slow = Said({"kind": "row", "reason": "MemoryError: out of memory"}), Said(*[None] * 8)
    pool, workers = Pool(tmp_path, 10, False, 2, 60.0), iter((short, slow))
    monkeypatch.setattr(pool, "_worker", lambda job: next(workers))
    monkeypatch.setattr("memopt.comparison.pool.time.sleep", lambda seconds: setattr(pool, "_end", 0.0))
    pool.add([JOB] * 2)
    late = "not ready within the 60 s that there were for everything"
    assert {number: said["reason"] for number, said in pool.run()} == {
        0: f"{late}, alone; beside others: MemoryError: out of memory",
        1: late,
    }
