"""Orders of smallest peak: against brute force on small graphs, on chains and branches, and the judge's refusals."""

import dataclasses
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.solve.order import Order, OrderError, OrderProblem, live_bytes, smallest_peak
from tests.solve.check_order import check_order


@st.composite
def problems(draw, most=7):
    """Small graphs: each operation creates a storage and reads some earlier ones; extra precedences and pins."""
    count = draw(st.integers(1, most))
    sizes = [draw(st.integers(0, 9)) for _ in range(count)]
    touches, after, takes = [], [], []
    for k in range(count):
        reads = draw(st.sets(st.integers(0, k - 1), max_size=3)) if k else set()
        extra = draw(st.sets(st.integers(0, k - 1), max_size=1)) if k else set()
        overwritten = [r for r in sorted(reads) if sizes[r] == sizes[k]]
        touches.append(tuple(sorted({k, *reads})))
        after.append(tuple(sorted(reads | extra)))
        takes.append(draw(st.sampled_from([-1, *overwritten])))
    workspace = tuple(draw(st.sampled_from([0, 0, 3])) for _ in range(count))
    pinned = frozenset(draw(st.sets(st.integers(0, count - 1), max_size=2)))
    # Storages with several producers: some storages become one.
    if count > 2 and draw(st.booleans()):
        kept, merged = sorted(draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True)))
        touches = [tuple(sorted({kept if s == merged else s for s in touched})) for touched in touches]
        takes = [-1] * count
    return OrderProblem(tuple(sizes), tuple(touches), tuple(after), workspace, pinned, tuple(takes))


def brute_force(problem):
    best = None
    for steps in itertools.permutations(range(len(problem.touches))):
        place = {operation: step for step, operation in enumerate(steps)}
        if all(place[a] < place[k] for k, before in enumerate(problem.after) for a in before):
            peak = max(live_bytes(problem, steps))
            best = peak if best is None else min(best, peak)
    return best


@settings(max_examples=400)
@given(problem=problems())
def test_it_is_the_best_of_all_orders(problem):
    order = smallest_peak(problem)
    check_order(problem, order)
    assert order.optimal and order.peak_bytes == brute_force(problem)


@settings(max_examples=200)
@given(problem=problems(), effort=st.integers(0, 20), beam=st.integers(1, 2))
def test_bounds_hold_however_little_effort_is_spent(problem, effort, beam):
    order = smallest_peak(problem, effort=effort, beam=beam)
    check_order(problem, order)
    best = brute_force(problem)
    assert order.lower_bound <= best <= order.peak_bytes


def chain(*sizes):
    """Operation k reads storage k - 1 and writes storage k."""
    count = len(sizes)
    touches = tuple((k,) if k == 0 else (k - 1, k) for k in range(count))
    after = tuple(() if k == 0 else (k - 1,) for k in range(count))
    return OrderProblem(sizes, touches, after, (0,) * count)


def test_a_chain_is_left_as_it_is():
    order = smallest_peak(chain(5, 8, 1, 4))
    assert order == Order((0, 1, 2, 3), 13, 13)


def test_branches_are_finished_one_after_the_other():
    # A source of 1 byte, four branches that rise to 10 bytes and shrink to 1, and a join of their ends.
    sizes, touches, after = [1], [(0,)], [()]
    for _ in range(4):
        top = len(sizes)
        sizes += [10, 1]
        touches += [(0, top), (top, top + 1)]
        after += [(0,), (top,)]
    ends = [2, 4, 6, 8]
    sizes.append(1)
    touches.append((*ends, 9))
    after.append(tuple(ends))
    breadth = [0, 1, 3, 5, 7, 2, 4, 6, 8, 9]
    new = {old: k for k, old in enumerate(breadth)}
    problem = OrderProblem(
        tuple(sizes),
        tuple(touches[old] for old in breadth),
        tuple(tuple(new[a] for a in after[old]) for old in breadth),
        (0,) * 10,
    )
    assert max(live_bytes(problem, range(10))) == 41
    order = smallest_peak(problem)
    check_order(problem, order)
    assert order.peak_bytes == 14 and order.optimal


def test_taking_over_memory_lowers_the_peak_only_where_nothing_else_needs_it():
    plain = chain(4, 4)
    assert smallest_peak(plain).peak_bytes == 8
    taking = dataclasses.replace(plain, takes=(-1, 0))
    assert smallest_peak(taking).peak_bytes == 4
    assert smallest_peak(dataclasses.replace(taking, pinned=frozenset({0}))).peak_bytes == 8


def test_sources_wait_for_their_first_reader():
    # 0 and 1 make large tensors that only the last two operations read.
    problem = OrderProblem(
        (9, 9, 5, 1, 1, 1),
        ((0,), (1,), (2,), (2, 3), (0, 3, 4), (1, 4, 5)),
        ((), (), (), (2,), (0, 3), (1, 4)),
        (0,) * 6,
    )
    order = smallest_peak(problem)
    assert order.peak_bytes == 11 and order.steps == (2, 3, 0, 4, 1, 5)


def test_a_wide_graph_gets_a_proven_gap():
    generator = random.Random(0)
    sizes, touches, after = [], [], []
    for layer in range(6):
        for _ in range(12):
            reads = generator.sample(range((layer - 1) * 12, layer * 12), 3) if layer else []
            sizes.append(generator.randint(1, 1000))
            touches.append((*reads, len(sizes) - 1))
            after.append(tuple(reads))
    problem = OrderProblem(tuple(sizes), tuple(touches), tuple(after), (0,) * len(sizes))
    given_peak = max(live_bytes(problem, range(len(sizes))))
    order = smallest_peak(problem, effort=3000)
    check_order(problem, order)
    assert order.lower_bound <= order.peak_bytes < given_peak
    assert smallest_peak(problem, effort=3000) == order


def test_a_graph_without_operations():
    assert smallest_peak(OrderProblem((), (), (), ())) == Order((), 0, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workspace": (0,)}, "one entry for each of 2"),
        ({"sizes": (1, -1)}, "negative"),
        ({"touches": ((0,), (0, 0))}, "operation 1 names a storage twice"),
        ({"touches": ((0,), (2,))}, "operation 1 names a storage twice, or one that does not exist"),
        ({"after": ((), (1,))}, "operation 1 comes after"),
        ({"takes": (1, -1)}, "operation 0 takes storage 1 without touching it"),
        ({"pinned": frozenset({7})}, "pinned names a storage that does not exist"),
    ],
)
def test_numbers_that_are_no_graph_are_refused(change, message):
    with pytest.raises(OrderError, match=message):
        dataclasses.replace(chain(1, 2), **change)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (Order((0, 1, 1), 10, 0), "no permutation of 3"),
        (Order((0, 2, 1), 10, 0), "operation 2 runs before operation 1"),
        (Order((0, 1, 2), 9, 0), "the peak is 10 bytes, not 9"),
        (Order((0, 1, 2), 10, 11), "lower bound of 11 bytes is above the peak of 10"),
    ],
)
def test_the_judge_refuses(order, message):
    with pytest.raises(OrderError, match=message):
        check_order(chain(1, 5, 5), order)
