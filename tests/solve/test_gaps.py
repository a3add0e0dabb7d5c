"""Gaps against a plain walk over the schedule, and on a step counted by hand."""

import itertools
from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.solve.gaps import GapFinder
from memopt.solve.rollout import FOREVER, Rollout
from tests.solve.hand import STEP, A, B
from tests.solve.judged import decisions
from tests.solve.problems import step_problems


def _find(problem, saved, hold):
    rollout = Rollout(problem)
    outcome = rollout.play(saved, hold)
    return rollout, outcome, GapFinder(rollout).find(outcome)


def _rows(gaps):
    columns = (gaps.storage, gaps.start, gaps.end, gaps.waits)
    return sorted(zip(*(column.tolist() for column in columns), strict=True))


def test_a_wait_ends_with_a_read_and_a_drop_with_a_write():
    _, _, gaps = _find(STEP, [True] * 6, [FOREVER] * 6)
    assert _rows(gaps) == [(A, 1, 3, 1), (B, 1, 2, 1)]
    assert gaps.first_touch.tolist() == [4, 3, 2, 4, 4, 4]
    assert gaps.reads_back.tolist() == [0, 1, 1, 0, 0, 0]
    # Steps 0 1 2 0 3: A is dropped after step 1, written again at 3 and read at 4.
    _, _, gaps = _find(STEP, [storage == B for storage in range(6)], [FOREVER] * 6)
    assert _rows(gaps) == [(A, 1, 3, 0), (A, 3, 4, 1), (B, 1, 2, 1)]
    assert gaps.first_touch.tolist() == [5, 3, 2, 5, 5, 5]


@settings(max_examples=200)
@given(data=st.data(), problem=step_problems())
def test_it_finds_what_a_walk_over_the_steps_finds(data, problem):
    rollout, outcome, gaps = _find(problem, *data.draw(decisions(problem)))
    touches, reads_back = defaultdict(list), [0] * len(problem.sizes)
    for step, operation in enumerate(outcome.steps):
        for storages, waits in ((problem.reads[operation], 1), (problem.writes[operation], 0)):
            for storage in storages:
                if rollout.fixed[storage]:
                    continue
                if step < problem.forward:
                    touches[storage] = []  # only the last touch in forward matters
                touches[storage].append((step, waits))
                reads_back[storage] += waits and step >= problem.forward
    expected = [
        (storage, start, end, waits)
        for storage, row in touches.items()
        for (start, _), (end, waits) in itertools.pairwise(row)
    ]
    assert _rows(gaps) == sorted(expected)
    assert gaps.reads_back.tolist() == reads_back
    count = len(outcome.steps)
    for storage, first in enumerate(gaps.first_touch.tolist()):
        assert first == min((step for step, _ in touches[storage] if step >= problem.forward), default=count)
    every = [storage * (count + 1) + step for storage, row in touches.items() for step, _ in row]
    assert gaps.keys.tolist() == sorted(every)
