"""Pinned buffers and their copies: what is used again when, what waits for what, and what is given back."""

import contextlib
import gc
import weakref

import pytest
import torch

from memopt.host import buffers as host
from memopt.host.buffers import Buffers, flat, span_bytes


class Event:
    def __init__(self, told):
        self.told = told

    def record(self, stream):
        self.told.append(("record", stream.name))

    def synchronize(self):
        self.told.append("synchronize")


class Stream:
    def __init__(self, told, name):
        self.told, self.name = told, name

    def wait_stream(self, other):
        self.told.append((self.name, "waits for", other.name))

    def wait_event(self, event):
        self.told.append((self.name, "waits for the copy"))


@pytest.fixture
def told(monkeypatch):
    """The buffers of a CPU, as if it had streams: what is asked of these, in order."""
    found = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(found, "side"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(found))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(found, "current"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: found.append("synchronize all"))
    monkeypatch.setattr(host, "_pinned", lambda size: torch.empty(size, dtype=torch.uint8))
    return found


CPU = torch.device("cpu")


def test_a_value_goes_and_comes_back_in_its_own_layout(told):
    pool, value = Buffers(CPU), torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last)
    held = pool.send(value)
    assert told == [("side", "waits for", "current"), ("record", "side")], "nothing is waited for yet"
    pool.wait(held)
    assert told[2:] == [("current", "waits for the copy")]
    again = pool.fetch(held)
    assert again.stride() == held.stride() == value.stride() and again.data_ptr() != held.data_ptr()
    assert told[3:] == [("side", "waits for", "current"), ("record", "side")]
    pool.wait(held)
    assert torch.equal(again, value)


def test_a_buffer_serves_again_once_nothing_lies_in_it(told):
    pool = Buffers(CPU)
    first, second = pool.send(torch.ones(100)), pool.send(torch.zeros(100))
    assert pool.pinned_bytes == 800
    kept = first.view(10, 10)  # as autograd may hold it
    del first
    third = pool.send(torch.full((100,), 3.0))
    assert pool.pinned_bytes == 1200 and kept.eq(1).all() and second.eq(0).all()
    del kept
    fourth = pool.send(torch.full((90,), 4.0))
    assert pool.pinned_bytes == 1200 and third.eq(3).all() and fourth.eq(4).all()
    del fourth
    pool.send(torch.ones(50))
    assert pool.pinned_bytes == 1400, "half of a buffer would be wasted"


def test_it_comes_back_as_often_as_it_is_asked_for(told):
    pool = Buffers(CPU)
    held = pool.send(torch.arange(12.0))
    for _ in range(2):
        value = pool.fetch(held)
        pool.wait(held)
        assert value.tolist() == list(range(12))


@pytest.mark.parametrize("back", [False, True], ids=["to the host", "back"])
def test_what_was_on_its_way_when_a_step_failed_stays_until_the_copy_is_over(told, back):
    pool, value = Buffers(CPU), torch.ones(100)
    held = pool.send(value)
    if back:
        pool.wait(held)
        value = pool.fetch(held)
    lost = weakref.ref(value.untyped_storage())
    del value
    gc.collect()
    assert lost() is not None or pool._of(held).moving is not None
    told.clear()
    pool.fetch(held)
    assert told[0] == ("current", "waits for the copy"), "before its memory may be another tensor's"
    pool.release()
    assert pool._of(held).moving is None


def test_nothing_is_asked_of_an_event_outside_of_its_capture(told, monkeypatch):
    pool, capturing = Buffers(CPU), [True]
    monkeypatch.setattr(host, "_captures", lambda device: capturing[0])
    held = pool.send(torch.ones(100))
    pool.wait(held)
    assert told[-1] == ("current", "waits for the copy")
    pool.fetch(held)
    told.clear()
    pool.release()
    assert told == [] and pool._of(held).moving is not None, "within, nothing is given back"
    capturing[0] = False
    pool.settle(held)
    pool.release()
    assert told == ["synchronize all"] and pool._of(held).moving is None
    del held
    pool.release()
    assert told == ["synchronize all"] * 2 and pool.pinned_bytes == 0
    held = pool.send(torch.ones(100))
    told.clear()
    pool.settle(held)
    assert told == ["synchronize"]


def test_another_tensor_in_its_place_is_copied_at_once(told):
    pool = Buffers(CPU)
    other = pool.send(torch.arange(4.0)).clone()  # as hooks of autograd's may give it
    told.clear()
    assert pool.fetch(other).tolist() == [0, 1, 2, 3] and told == []
    pool.wait(other)
    assert told == []


def test_buffers_are_given_back_with_the_last_step_that_uses_them(told, monkeypatch):
    pool = Buffers(CPU)
    monkeypatch.setattr(host, "_BUFFERS", {CPU: pool})
    monkeypatch.setattr(host, "_OWNERS", set())
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: told.append("given back"), raising=False)
    assert host.buffers_of(CPU) is pool

    def first():
        return None

    def second():
        return None

    host.keep_for(first)
    host.keep_for(second)
    held, other = pool.send(torch.ones(100)), pool.send(torch.ones(100))
    del other, first
    assert pool.pinned_bytes == 800
    del second
    assert pool.pinned_bytes == 400 and told[-2:] == ["synchronize", "given back"]
    assert held.eq(1).all()


def test_where_nothing_can_be_pinned_it_goes_without(monkeypatch):
    given = []

    def empty(size, *, dtype, pin_memory=False):
        given.append(pin_memory)
        if pin_memory:
            raise RuntimeError("no more")
        return "plain"

    monkeypatch.setattr(torch, "empty", empty)
    assert host._pinned(8) == "plain" and given == [True, False]


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(3, 4),
        torch.randn(4, 3).t(),
        torch.randn(3, 4)[:, :2],
        torch.randn(3, 1).expand(3, 4),
        torch.randn(10)[3:],
        torch.empty(0, 3),
        torch.tensor(2.0),
    ],
)
def test_a_layout_is_one_piece(value):
    other = torch.empty_strided(value.size(), value.stride())
    flat(other).copy_(flat(value))
    assert torch.equal(other, value) and span_bytes(value) == 4 * flat(value).numel()
