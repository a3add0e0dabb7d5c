"""The allocator's events of a stretch of code: what ends a recording, and what is seen in it."""

import threading

import pytest
import torch

from memopt.memory.allocator_events import MeasuringError, Recording, is_profiled, record

KB = 1024


def block(kilobytes):
    return torch.empty(kilobytes * KB, dtype=torch.uint8)


def test_marks():
    with Recording(torch.device("cpu")) as recording:
        recording.mark("begin")
        block(1)
        recording.mark("end")
        block(2)
    begin, end = recording.marks["begin"], recording.marks["end"]
    assert [size for time, size in recording.changes if begin <= time <= end] == [KB, -KB]
    assert [size for time, size in recording.changes if time > end] == [2 * KB, -2 * KB]


def test_what_is_called_within_a_backward_pass_is_measured():
    """As planning is, where a checkpoint computes a compiled model again."""
    found = []

    def look(gradient):
        found.append(record(lambda: torch.empty(256), torch.device("cpu")).changes)

    x = torch.ones(8, requires_grad=True)
    (product := x * 2).register_hook(look)
    product.sum().backward()
    assert next(size for _, size in found[0]) == 1024
    assert not torch._C._autograd._profiler_enabled()


def test_beside_a_recording_of_another_thread_nothing_is_measured_and_it_ends_in_its_own():
    recording, said = Recording(torch.device("cpu"), yields=True), []

    def work():
        said.append(is_profiled())
        with pytest.raises(MeasuringError, match="in this thread while another one is in a loop within a budget"):
            Recording(torch.device("cpu")).begin()

    recording.begin()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert said == [True] and not is_profiled() and recording.ended


@pytest.mark.parametrize("yields", [False, True])
def test_a_recording_ends_before_the_process_does(yields, monkeypatch):
    at_exit = []
    monkeypatch.setattr("atexit.register", at_exit.append)
    monkeypatch.setattr("atexit.unregister", at_exit.remove)
    recording = Recording(torch.device("cpu"), yields=yields)
    recording.begin()
    at_exit[-1]()  # else torch's profiler ends in a segmentation fault
    assert recording.ended and not is_profiled() and not at_exit


def test_what_marks_a_release_is_not_traced_between_two_graphs():
    """Dynamo looks at every frame there: it traced this one, which ended in an error of its own that nobody saw."""
    there = [torch.ones(64)]
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend)
    def lets_go(x):
        y = x.sin()
        torch._dynamo.graph_break()
        there.clear()
        torch._dynamo.graph_break()
        return y.cos()

    recording = Recording(torch.device("cpu"), [there[0].untyped_storage()])
    with recording:
        lets_go(torch.ones(4))
    assert any(size == -256 for _, size in recording.changes) and len(graphs) == 2
