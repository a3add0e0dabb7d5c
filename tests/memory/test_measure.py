"""measure(): exact bytes on cases that can be counted by hand."""

import threading

import pytest
import torch

from memopt.memory.measure import measure
from tests.support import allocations

KB = 1024


def block(kilobytes):
    return torch.empty(kilobytes * KB, dtype=torch.uint8)


def test_peak_end_and_timeline_are_exact():
    def fn():
        first = block(100)
        second = block(30)
        del first
        third = block(60)
        del third
        return second

    measured = measure(fn, timeline=True)
    assert measured.timeline == tuple(k * KB for k in (100, 130, 30, 90, 30))
    assert (measured.peak_bytes, measured.end_bytes) == (130 * KB, 30 * KB)
    assert measured.value.numel() == 30 * KB
    assert measured.seconds > 0 and measured.reserved_bytes is None
    assert measure(fn).timeline is None
    assert allocations(fn) == [k * KB for k in (100, 30, -100, 60, -60)]


def test_nothing_allocated():
    measured = measure(lambda: 3, timeline=True)
    assert (measured.value, measured.peak_bytes, measured.end_bytes, measured.timeline) == (3, 0, 0, ())


def test_arguments_and_modules():
    model, x = torch.nn.Linear(64, 32), torch.randn(16, 64)
    with torch.no_grad():
        assert measure(model, x).peak_bytes == 16 * 32 * 4
        assert measure(torch.add, x, other=x, alpha=2).end_bytes == 16 * 64 * 4


def test_backward_is_seen():
    weight = torch.randn(64, 64, requires_grad=True)
    x = torch.randn(16, 64)
    weight.grad = None
    measured = measure(lambda: (x @ weight).sum().backward())
    assert measured.end_bytes == 64 * 64 * 4
    assert weight.grad.shape == (64, 64)
    assert measured.peak_bytes >= measured.end_bytes


def test_memory_of_earlier_has_no_part_in_it():
    held = [measure(block, 500).value]  # allocated inside an earlier measurement: its address is known to the profiler

    def fn():
        held.clear()
        return block(20)

    measured = measure(fn, timeline=True)
    assert measured.timeline == (20 * KB,)


def test_the_value_alone_is_kept_alive():
    measured = measure(lambda: (block(50), block(70))[1])
    assert measured.peak_bytes == 120 * KB and measured.end_bytes == 70 * KB


def test_exceptions_pass_through_and_the_profiler_stops():
    def fn():
        block(10)
        raise KeyError("inside")

    for _ in range(2):
        with pytest.raises(KeyError, match="inside"):
            measure(fn)
    assert not torch._C._autograd._profiler_enabled()
    assert measure(block, 10).peak_bytes == 10 * KB


def test_nested_calls_are_refused():
    with pytest.raises(RuntimeError, match="already running"):
        measure(lambda: measure(block, 1))
    with torch.autograd.profiler.profile(), pytest.raises(RuntimeError, match="while a profiler is active"):
        measure(block, 1)
    assert measure(block, 1).peak_bytes == KB


def test_other_threads_are_not_counted():
    def fn():
        thread = threading.Thread(target=lambda: block(1000))
        thread.start()
        thread.join()
        return block(5)

    assert measure(fn).peak_bytes == 5 * KB


def test_compiled_code_is_seen():
    def fn(x):
        return (x @ x).relu().sum(1)

    x = torch.randn(64, 64)
    compiled = torch.compile(fn, backend="aot_eager")
    compiled(x)
    assert measure(compiled, x).peak_bytes == measure(fn, x).peak_bytes


def test_unknown_devices_are_refused():
    with pytest.raises(ValueError, match="knows cpu and cuda, not meta"):
        measure(block, 1, device="meta")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("timeline", [False, True])
def test_cuda(timeline):
    x = torch.randn(1024, 1024, device="cuda")
    old = [torch.empty(2**20, device="cuda")]
    x @ x  # makes cuBLAS's workspace

    def fn(x):
        y = x + 1
        z = y * 2
        del y
        return z[0].clone()

    measured = measure(fn, x, timeline=timeline)
    assert (measured.peak_bytes, measured.end_bytes) == (2 * 4 * 2**20, 4096)
    assert measured.reserved_bytes >= measured.peak_bytes + x.nbytes
    if timeline:
        assert max(measured.timeline) == measured.peak_bytes and measured.timeline[-1] == measured.end_bytes
    assert measure(old.clear, device="cuda").end_bytes == -4 * 2**20
