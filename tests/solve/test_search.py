"""Steps from decision to decision: right schedules only, never worse than what they were given, the same every time."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.solve.rollout import FOREVER, Rollout
from memopt.solve.search import Move, Search
from tests.solve.hand import KEEP_ALL, REMAKE_A, STEP, A, B
from tests.solve.judged import JudgedSearch, decisions
from tests.solve.oracle import least_peak
from tests.solve.problems import chain, skips, step_problems


def _excess(state, target):
    return sum(max(0, live - target) for live in state.outcome.live.tolist())


def _remade(search):
    return search.play([storage == B for storage in range(6)], [FOREVER] * 6)


def _layers(state):
    return [storage for storage in range(1, 5) if state.saved[storage]]  # of a chain of four


def test_by_hand_the_one_wait_above_the_target_is_ended():
    search = JudgedSearch(STEP)
    fastest = search.fastest()
    assert tuple(fastest.outcome.steps) == KEEP_ALL
    [move] = search.evictions(fastest, 33)
    assert (move.storage, move.start, move.end, move.hold, move.anchors) == (A, 1, 3, -1, ())
    assert move.gain == pytest.approx(10.0)  # 10 bytes for one step, for one second
    assert search.evictions(fastest, 39) == []
    squeezed = search.squeeze(fastest, 33)
    assert (tuple(squeezed.outcome.steps), squeezed.peak) == (REMAKE_A, 33)


@pytest.mark.parametrize(("small", "anchors", "gain"), [(10, (), 20 / 3), (1, (A,), 19 / 2)])
def test_by_hand_a_small_copy_is_kept_as_anchor_where_that_frees_more_per_second(small, anchors, gain):
    # B waits for operation 3, and A is there for B alone: dropping B costs 3 s, or 2 s and A's bytes.
    late = dataclasses.replace(STEP, sizes=(0, small, 20, 4, 5, 7), reads=((0,), (A,), (3,), (B, 4)))
    search = JudgedSearch(late)
    [move] = search.evictions(search.fastest(), 28)
    assert (move.storage, move.start, move.end, move.hold, move.anchors) == (B, 1, 3, -1, anchors)
    assert move.gain == pytest.approx(gain)


def test_by_hand_a_wait_begins_where_it_fits():
    search = JudgedSearch(STEP)
    remade = _remade(search)
    [move] = search.refills(remade, 39)
    assert (move.storage, move.start, move.end, move.hold) == (A, 1, 3, -1)
    assert move.gain == pytest.approx(1 / (10 * 2 + 1))
    assert search.refills(remade, 38) == []
    assert search.relax(remade, 38) is remade
    assert tuple(search.relax(remade, 39).outcome.steps) == KEEP_ALL


def test_apply_changes_only_what_the_moves_name():
    search = JudgedSearch(chain(4))
    state = search.fastest()
    after = search.apply(state, [Move(4, 3, 4, -1, 0.0), Move(1, 3, 7, -1, 0.0), Move(3, 5, 6, 2, 0.0)], False)
    assert _layers(after) == [2, 3]
    assert after.hold == [2 if s == 3 else FOREVER for s in range(9)]
    anchored = search.apply(after, [Move(2, 1, 6, -1, 0.0, (1,))], False)
    assert _layers(anchored) == [1, 3]
    back = search.apply(after, [Move(4, 3, 4, -1, 0.0), Move(3, 5, 6, 1, 0.0)], True)
    assert back.saved[4] and back.hold[3] == 2  # a wait that begins never shortens a hold


def test_splice_takes_the_first_operations_from_one_and_the_rest_from_the_other():
    search = JudgedSearch(chain(4))
    everything = search.fastest()
    nothing = search.play([False] * 9, [FOREVER] * 9)
    assert _layers(search.splice(everything, nothing, 2)) == [1, 2]
    assert _layers(search.splice(nothing, everything, 3)) == [4]
    assert search.splice(nothing, everything, 0).outcome.steps == everything.outcome.steps


def test_a_late_search_plays_nothing_more():
    over = Search(Rollout(STEP), -1)
    state = over.fastest()
    assert over.late and over.squeeze(state, 0) is state and over.relax(state, 1000) is state
    search = JudgedSearch(STEP, operations=3)
    assert not search.late
    state = search.fastest()  # 4 operations
    assert search.late and search.squeeze(state, 0) is state
    search.allow(100)
    assert not search.late and search.squeeze(state, 33).peak == 33


def test_a_chain_is_squeezed_to_a_few_copies():
    search = JudgedSearch(chain(9), operations=float("inf"))
    state = search.fastest()
    assert state.peak == 10 and least_peak(chain(5)) == 3
    assert search.squeeze(state, 6).peak <= 6  # about twice the square root of 9


def test_a_vain_move_is_set_aside_and_the_next_one_tried():
    reached = []
    for patience in (1, 20):
        search = JudgedSearch(skips(8, 5), float("inf"))
        fastest = search.fastest()
        targets = range(fastest.peak - 1, fastest.peak // 2, -4)
        reached.append(sum(search.squeeze(fastest, target, patience).peak <= target for target in targets))
    assert reached[1] > reached[0]


def test_the_archive_holds_every_decision_played():
    search = JudgedSearch(STEP)
    _remade(search), search.fastest()
    assert [state.peak for state in search.archive.states] == [33, 39]


@settings(max_examples=120)
@given(data=st.data(), problem=step_problems())
def test_no_step_is_worse_than_what_it_was_given(data, problem):
    search = JudgedSearch(problem)
    state = search.play(*data.draw(decisions(problem)))
    target = data.draw(st.integers(0, state.peak + 1))
    search.early = data.draw(st.sampled_from((0.0, 0.3, 1.0)))
    squeezed = search.squeeze(state, target)
    assert squeezed is state or _excess(squeezed, target) < _excess(state, target)
    for moves in (search.evictions(state, target), search.refills(state, target)):
        gains = [move.gain for move in moves]
        assert gains == sorted(gains, reverse=True) and min(gains, default=1) > 0
        assert not any(search.rollout.fixed[move.storage] for move in moves)
        assert all((move.hold < 0) == (move.start < problem.forward) for move in moves)
    for start in (state, squeezed):
        relaxed = search.relax(start, target)
        assert relaxed is start or (relaxed.peak <= target and relaxed.seconds < start.seconds)
    fastest = search.fastest()
    assert fastest.outcome.steps == list(range(len(problem.reads)))
    # The same problem and the same steps lead to the same decisions.
    again = JudgedSearch(problem)
    again.early = search.early
    assert again.squeeze(again.play(state.saved, state.hold), target).outcome.steps == squeezed.outcome.steps
