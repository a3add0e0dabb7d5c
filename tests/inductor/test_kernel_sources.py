"""Sources that one process tells another: in order, once each, and not before the pool can take them."""

import contextlib
import os

import pytest

from memopt.inductor.kernel_sources import KernelSources
from memopt.torch_compat import kernel_pool
from tests.forks import fork


@pytest.fixture
def pool(monkeypatch):
    """Whether the pool's processes have started, and what they were given."""
    ready, given = [True], []
    compiler = kernel_pool.async_compile.AsyncCompile
    monkeypatch.setattr(compiler, "use_process_pool", classmethod(lambda cls: ready[0]))
    monkeypatch.setattr(compiler, "triton", lambda self, *told: given.append(told))
    return ready, given


@contextlib.contextmanager
def told_by_a_copy(sources, *, cut=0):
    """What a process tells of these, with the last so many bytes left out; it has ended by then."""
    with contextlib.closing(KernelSources()) as kernels:
        _tell(kernels, sources, cut)
        yield kernels


def _tell(kernels, sources, cut):
    copy = fork()
    if not copy:
        kernels.tell()
        for source in sources:
            kernel_pool.async_compile.AsyncCompile().triton("name", source)
        number = kernels._file.fileno()
        os.ftruncate(number, os.fstat(number).st_size - cut)
        os._exit(0)
    os.waitpid(copy, 0)


def test_what_a_copy_tells_is_compiled_once_and_in_order(pool):
    with told_by_a_copy(["a" * 10**6, "b"]) as kernels:
        kernels.listen()
        assert [source for _, source in pool[1]] == ["a" * 10**6, "b"]
        kernels.listen()
    assert len(pool[1]) == 2


def test_what_is_not_written_to_its_end_waits(pool):
    with told_by_a_copy(["a", "b"], cut=1) as kernels:
        kernels.listen()
    assert [source for _, source in pool[1]] == ["a"]


def test_sources_wait_until_there_are_processes_to_compile_them(pool):
    ready, given = pool
    ready[0] = False
    with told_by_a_copy(["a", "b"]) as kernels:
        kernels.listen()
        assert not given
        ready[0] = True
        kernels.listen()
    assert [source for _, source in given] == ["a", "b"]
