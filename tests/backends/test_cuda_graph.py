"""CUDA graphs of bound functions: equal to the function itself, captured anew where they must be, or not at all."""

import contextlib
import logging
import os
import warnings
from types import SimpleNamespace

import pytest
import torch

from memopt.backends import cuda_graph
from memopt.backends.cuda_graph import Replay, _own_random_state, new_graph, smallest_segment


class Counted:
    """A function of x and w, and how often Python ran it: before and in each capture, never in a replay."""

    def __init__(self, function=lambda x, w: [x @ w, x.sum(0)]):
        self.function, self.calls = function, 0

    def __call__(self, *values):
        self.calls += 1
        return self.function(*values)


def operands():
    return torch.randn(16, 8, device="cuda"), torch.randn(8, 4, device="cuda")


def same(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
        assert a.stride() == b.stride()


@pytest.mark.gpu
def test_inputs_are_copied_in_and_results_outlive_the_next_replay():
    function, (x, w) = Counted(), operands()
    replay = Replay(function, [0])
    first = replay(x, w)
    kept, calls = [value.clone() for value in first], function.calls
    assert calls >= 2 and not replay.impossible
    other = torch.randn_like(x)
    same(replay(other, w), function.function(other, w))
    same(first, kept)
    assert function.calls == calls


@pytest.mark.gpu
def test_what_is_read_in_place_follows_its_values_and_its_address():
    function, (x, w) = Counted(), operands()
    replay = Replay(function, [0])
    replay(x, w)
    calls = function.calls
    w.mul_(2)
    same(replay(x, w), function.function(x, w))
    assert function.calls == calls
    moved = w.clone()
    same(replay(x, moved), function.function(x, moved))
    assert function.calls == calls + 1, "another address is another graph, of which all is known"


@pytest.mark.gpu
def test_a_released_graph_is_captured_again():
    function, (x, w) = Counted(), operands()
    replay = Replay(function, [0])
    replay(x, w)
    calls = function.calls
    replay.release()
    same(replay(x, w), function.function(x, w))
    assert function.calls == calls + 1


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x, w: [x @ w, w], "a result shares memory with another one or with an input"),
        (lambda x, w: [(y := x @ w), y[0]], "a result shares memory with another one or with an input"),
        (lambda x, w: [(x @ w).cpu()], "a result is not on the device"),
        (lambda x, w: [x * float(w.sum())], ""),  # it waits for the device, which a capture does not allow
    ],
)
@pytest.mark.gpu
def test_what_cannot_be_captured_runs_as_it_is(function, reason, caplog):
    counted, (x, w) = Counted(function), operands()
    replay = Replay(counted, [0])
    with caplog.at_level(logging.INFO, logger="memopt"):
        for _ in range(2):
            same(replay(x, w), function(x, w))
    assert replay.impossible and replay.impossible.startswith(reason)
    assert [record.getMessage() for record in caplog.records] == [f"no CUDA graph is used: {replay.impossible}"]
    torch.cuda.synchronize()
    torch.manual_seed(3)
    drawn = torch.randn(4, device="cuda")  # the device's generator is as it was
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.randn(4, device="cuda"))


@pytest.mark.gpu
def test_an_input_that_overlaps_itself_is_not_copied_into():
    function, (x, w) = Counted(), operands()
    replay = Replay(function, [0])
    wide = x[:1].expand(16, 8)
    same(replay(wide, w), function.function(wide, w))
    assert replay.impossible == "an input overlaps itself"


@pytest.mark.gpu
def test_the_caller_s_results_are_finished_from_what_the_graph_returns():
    function, (x, w) = Counted(), operands()
    copied = []

    def finish(outputs, values, copy):
        copied.append(copy(outputs[1]))
        return [outputs[0] * 2, copied[-1], values[1]]

    replay = Replay(function, [0], finish=finish)
    for scale in (1, 3):
        found = replay(x * scale, w)
        product, total = function.function(x * scale, w)
        same(found[:2], [product * 2, total])
        assert found[2] is w


@pytest.mark.gpu
def test_a_capture_draws_no_numbers_of_the_caller_s():
    x, w = operands()
    torch.manual_seed(3)
    expected = torch.randn(4, device="cuda"), torch.randn(4, device="cuda")
    torch.manual_seed(3)
    first = torch.randn(4, device="cuda")
    replay = Replay(Counted(), [0])
    replay(x, w)
    replay(x, w)
    same([first, torch.randn(4, device="cuda")], expected)


@pytest.mark.gpu
def test_settings_are_as_they_were_after_a_capture(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    seen = []

    def function(x, w):
        seen.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
        return [x @ w]

    Replay(function, [0])(*operands())
    assert set(seen) == {":4096:1"} and "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_a_capture_that_fails_keeps_the_broken_state_to_itself(monkeypatch):
    class Generator:
        state = "the caller's"

        def graphsafe_get_state(self):
            return self.state

        def graphsafe_set_state(self, state):
            self.state = state

        def clone_state(self):
            return f"a copy of {self.state}"

    generator = Generator()
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(RuntimeError), _own_random_state():
        assert generator.state == "a copy of the caller's"
        raise RuntimeError("the capture failed")
    assert generator.state == "the caller's"


class Graph:
    """Stands for torch's."""


@pytest.fixture
def captures(monkeypatch):
    """Captures that record nothing: PyTorch warns that the graph is empty, also where memory ran out in it."""

    generator = SimpleNamespace(
        graphsafe_get_state=lambda: None, clone_state=lambda: None, graphsafe_set_state=lambda state: None
    )

    @contextlib.contextmanager
    def graph(*args, **options):
        try:
            yield
        finally:
            warnings.warn("The CUDA Graph is empty. This usually means that ...", UserWarning, stacklevel=1)

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    for name in ("synchronize", "empty_cache", "graph_pool_handle", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(cuda_graph, "_capture_stream", lambda device: None)
    monkeypatch.setattr(cuda_graph, "_available_to_begin", lambda stream: [])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)


def test_memory_that_runs_out_before_the_first_kernel_of_a_capture_is_the_reason_that_is_given(captures):
    def short():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB")

    replay = Replay(short, [])
    replay._segment = 0
    replay._finish_capture()
    assert replay.impossible == "CUDA out of memory. Tried to allocate 64.00 MiB"


def test_buffers_of_cublas_are_small_in_every_capture(captures, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    seen = []
    monkeypatch.setattr(torch.cuda, "memory_snapshot", list)
    replay = Replay(lambda: seen.append(os.environ["CUBLAS_WORKSPACE_CONFIG"]) or [], [])
    assert replay._reserved_with(0) == 0 and seen == [":4096:1"]
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_the_device_has_done_its_work_before_a_graph_s_memory_is_given_back(captures, monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    graph = new_graph()
    assert not waited
    del graph
    assert waited == [0]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    new_graph()
    assert waited == [0], "a capture would fail"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    graph, here = new_graph(), os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: here + 1)
    del graph
    assert waited == [0], "a copy of the process has no device"


def test_what_finish_makes_alone_needs_no_graph(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    replay = Replay(lambda x: [], [], finish=lambda outputs, values, copy: [values[0] + 1])
    for _ in range(2):
        assert replay(torch.zeros(2))[0].tolist() == [1, 1]
    assert replay.impossible == "there is nothing to capture"


@pytest.mark.gpu
@pytest.mark.parametrize("expand", [True, False])
def test_a_graph_s_pool_is_no_larger_than_its_blocks_need(expand):
    from memopt.memory import allocator

    def function(x, w):  # 24 MiB, 12 beside it, then 24 beside these 12
        wide = torch.cat([x, x])
        narrow = wide[: len(x)] * 2
        del wide
        return [torch.cat([narrow, x])[::64] * 2, x[:16] @ w]  # sums would take buffers of their own

    def near(found, expected):  # cuBLAS adds up in another order where its buffer is small
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)

    allocator._set_expandable(expand)
    try:
        x, w = torch.randn(3 * 2**10, 2**10, device="cuda"), torch.randn(2**10, 4, device="cuda")
        replay = Replay(function, [])
        near(replay(x, w), function(x, w))
        reserved = replay._reserved_with(replay._segment)
        assert reserved <= replay._reserved_with(0)
        if expand:
            assert 36 * 2**20 <= reserved < 40 * 2**20  # it would grow to 40
        near(replay(x * 2, w), function(x * 2, w))
    finally:
        allocator._set_expandable(True)


@pytest.mark.parametrize(
    ("needed", "grown", "found"),
    [(41, 60, 42), (42, 60, 42), (60, 60, 0), (4, 20, 10), (0, 0, 0), (61, 60, 0), (31, 32, 0), (30, 31, 30)],
)
def test_the_least_segment_is_found_by_trial(needed, grown, found):
    tried = []

    def reserved(segment):
        tried.append(segment)
        return grown * 2**20 if not segment else segment + (0 if segment >= needed * 2**20 else 20 * 2**20)

    assert smallest_segment(reserved) == found * 2**20
    assert len(tried) <= 5
