"""A window between a model's call and backward: what the allocator holds there, until somebody else looks."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading

import pytest
import torch

from memopt.memory.allocator_events import Recording, is_profiled
from memopt.memory.live_tensors import live_blocks
from memopt.memory.measure import measure
from memopt.memory.window import Held, Window, peak_with_old
from memopt.torch_compat.autograd_nodes import at_end_of_backward

KILO = 1024
CPU = torch.device("cpu")


def kilobyte():
    return torch.empty(KILO // 4)


def test_peak_and_what_is_left():
    window = Window(CPU, ())
    kept = [kilobyte()]
    kept.append(torch.empty(KILO))
    del kept[1:]
    assert window.close() == Held(5 * KILO, KILO) == window.close()
    assert not is_profiled()


@pytest.mark.parametrize(
    ("sums", "lives", "most", "kept"),
    [
        pytest.param([0, 2, 5, 2], [(0, None, 2), (1, 2, 3)], 5, 2, id="made anew before the most is there"),
        pytest.param([0, 3, 0, 2], [(0, 1, 3), (2, None, 2)], 5, 2, id="made anew behind it"),
        pytest.param([0, 2, 5, 2, 4], [(0, None, 2), (1, 2, 3), (3, None, 2)], 9, 4, id="a part made anew behind it"),
        pytest.param([0, 3, 0, 2], [(0, 1, 3), (2, 8, 2)], 3, 0, id="gone within backward"),
        pytest.param([0, 3, 0, 2], [(0, 1, 3), (2, 9, 2)], 5, 2, id="gone behind backward"),
    ],
)
def test_what_a_step_keeps_is_there_in_the_next_one_until_all_of_it_is_made_anew(sums, lives, most, kept):
    assert peak_with_old(range(len(sums) - 1), sums, 0, lives, 9) == (most, kept)
    assert peak_with_old([-5, *range(len(sums) - 1)], [7, *(7 + each for each in sums)], 1, lives, 9) == (most, kept)


def test_what_comes_after_backward_begins_is_left_out():
    window, seen = Window(CPU, ()), []
    x = torch.ones(KILO // 4, requires_grad=True)
    product = x * 2

    def begins(_):
        window.backward_begins()
        seen.append(window.close())  # not before backward is over

    product.grad_fn.register_prehook(begins)
    product.sum().backward()
    assert seen == [None] and window.backward
    held = window.close()
    assert held is not None and 2 * KILO <= held.peak <= 2 * KILO + 16
    assert not is_profiled()


def test_a_window_that_is_open_since_before_forward_says_what_the_whole_has_held():
    x = torch.ones(KILO // 4, requires_grad=True)
    window = Window(CPU, ())
    more = torch.empty(KILO)
    product = x * 2
    del more
    window.forward_ends()
    loss = (product + 1).sum()
    product.grad_fn.register_prehook(lambda _: window.backward_begins())
    torch.autograd.backward(loss)
    window.backward_ends()
    after = torch.empty(10 * KILO)
    held = window.close()
    assert 5 * KILO <= held.whole < 6 * KILO and KILO <= held.peak < 2 * KILO and held.live < 64 and len(after)


def test_what_is_held_behind_the_models_graphs_is_told_apart():
    x = torch.ones(KILO // 4, requires_grad=True)
    before = x.square().sum()  # its backward comes last
    window, kept = Window(CPU, ()), []
    product = x * 2

    def begins(_):
        window.backward_begins()
        kept.append(torch.empty(KILO))

    def left(*_):
        window.graphs_end()
        kept.clear()

    def over():
        window.backward_ends()

    product.grad_fn.register_prehook(begins)
    product.grad_fn.register_hook(left)
    product.grad_fn.register_hook(lambda *_: at_end_of_backward(over))
    (product.sum() + before).backward()
    held = window.close()
    assert held is not None and held.inside >= 5 * KILO
    assert 2 * KILO <= held.behind <= held.inside == held.whole


def test_what_was_there_before_and_goes_behind_the_graphs_is_not_held_together_with_what_comes():
    x = torch.ones(KILO // 4, requires_grad=True)
    before, kept = x.square().sum(), [torch.empty(100 * KILO)]
    there = sum(block.nbytes for block in live_blocks(CPU).values())
    window = Window(CPU, ())
    product = x * 2

    def left(*_):
        window.graphs_end()
        kept.clear()
        kept.append(torch.empty(50 * KILO))

    product.grad_fn.register_prehook(lambda _: window.backward_begins())
    product.grad_fn.register_hook(left)
    product.grad_fn.register_hook(lambda *_: at_end_of_backward(window.backward_ends))
    (product.sum() + before).backward()
    held = window.close()
    assert held is not None and held.behind >= 200 * KILO
    assert there <= held.together < there + 100 * KILO


def test_graphs_that_another_backward_leaves_are_not_behind_those_of_the_first():
    x = torch.ones(KILO // 4, requires_grad=True)
    window = Window(CPU, ())
    product = x * 2
    product.grad_fn.register_prehook(lambda _: window.backward_begins())
    product.grad_fn.register_hook(lambda *_: window.graphs_end())
    loss = product.sum()
    loss.backward(retain_graph=True)
    window.backward_ends()
    kept = kilobyte()
    loss.backward()
    held = window.close()
    assert held is not None and (held.behind, held.together) == (0, 0) and len(kept)


def test_it_ends_where_somebody_measures():
    window = Window(CPU, ())
    kept = kilobyte()
    assert measure(kilobyte).peak_bytes == KILO
    assert kilobyte() is not kept
    assert window.close() == Held(KILO, KILO)


def test_within_a_profiler_nothing_is_seen():
    with Recording(CPU):
        window = Window(CPU, ())
        assert window.close() is None
        assert is_profiled()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_where_processes_work_together_no_profiler_is_started():
    """Its events are also written by the collectives' threads: other memory was spoiled, and gradients were wrong."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        window = Window(CPU, ())
        assert not torch._C._autograd._profiler_enabled()
        assert window.close() is None
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("recorded", [False, True])
def test_what_was_there_before_is_seen_to_go_once(recorded):
    """The allocator tells of a release where a recording has seen the address before; by chance, in a loop."""
    with Recording(CPU) if recorded else contextlib.nullcontext():
        there = torch.ones(256)
    window = Window(CPU, [there.untyped_storage()])
    view = there[1:]
    del there
    kept = kilobyte()
    del view
    window.backward_begins()
    assert window.close() == Held(KILO, 0) and len(kept)


def test_nothing_is_looked_at_in_another_thread_which_may_end_before_the_window_does():
    seen = []

    def work():
        window = Window(CPU, ())
        seen.append(is_profiled())
        window.forward_ends()
        seen.append(window.close())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False, None]


@pytest.mark.parametrize("known", [False, True], ids=["unknown", "known"])
def test_what_the_process_holds_behind_backward_counts_what_was_there_before_until_it_goes(known):
    gc.collect()
    gc.freeze()  # what other tests keep is no part of it
    x = torch.ones(KILO // 4, requires_grad=True)
    there, more = kilobyte(), [kilobyte()]
    window = Window(CPU, [there.untyped_storage()] if known else ())
    more.append(kilobyte())
    product = x * 2
    product.grad_fn.register_prehook(lambda _: window.backward_begins())
    product.sum().backward()
    window.backward_ends()
    del there, more[:]
    clones = [x.grad.clone() for _ in range(4)]
    held = window.close()
    assert held is not None and len(clones) == 4
    # x, its gradient, the product, and the clones, once three others have gone
    assert 7 * KILO <= held.after <= 7 * KILO + 16


def reached(window, _):
    """A backward has reached the graph."""
    if window.over:
        window.another_begins()
    else:
        window.backward_begins()


def test_another_backward_through_the_same_graph_is_none_of_what_is_behind_one():
    gc.collect()
    gc.freeze()
    x = torch.ones(KILO // 4, requires_grad=True)
    window = Window(CPU, ())
    product = x * 2
    product.grad_fn.register_prehook(functools.partial(reached, window))
    loss = product.sum()
    loss.backward(retain_graph=True)
    window.backward_ends()
    logged = x.grad.clone()
    loss.backward()
    large = torch.empty(10 * KILO)
    held = window.close()
    assert held is not None and len(large) == 10 * KILO
    assert 4 * KILO <= held.after <= 4 * KILO + 16 and len(logged)
    assert len(held.again) == 1 and 2 * KILO <= held.again[0] <= 2 * KILO + 16  # the gradient, and what is logged


def test_of_several_backwards_each_is_seen_as_it_begins():
    x = torch.ones(KILO // 4, requires_grad=True)
    window = Window(CPU, ())
    product = x * 2
    product.grad_fn.register_prehook(functools.partial(reached, window))
    loss, made = product.sum(), []
    for number in range(3):
        loss.backward(retain_graph=number < 2)
        if not number:
            window.backward_ends()
        made.append(kilobyte())
    held = window.close()
    assert held is not None and len(made) == 3
    assert [size // KILO for size in held.again] == [2, 3]
