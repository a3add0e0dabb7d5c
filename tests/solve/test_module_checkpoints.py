"""Sets of nested calls to checkpoint: the outermost below a size, by the peak that they are expected to lead to."""

from memopt.solve.module_checkpoints import Nested, choices


def test_blocks_are_better_than_the_whole_and_than_their_parts():
    calls = [Nested(None, 100, 120)]
    for _ in range(4):
        calls += [Nested(0, 25, 30), Nested(len(calls), 5, 6), Nested(len(calls), -3, 2)]
    found = choices(calls, 1, 5)
    assert found[0] == [1, 4, 7, 10] and [0] in found and [2, 5, 8, 11] in found
    assert choices(calls, 1, 1) == found[:1]


def test_in_several_calls_the_whole_may_be_best():
    calls = [Nested(None, 100, 100), Nested(0, 40, 50)]
    assert choices(calls, 1, 2)[0] == [0] or choices(calls, 1, 2)[0] == [1]
    assert choices(calls, 4, 2)[0] == [0]


def test_what_may_not_be_recomputed_leaves_its_parts():
    calls = [Nested(None, 0, 90), Nested(0, 30, 40), Nested(0, 30, 40), Nested(2, 20, 20)]
    assert choices(calls, 1, 9) == [[1, 2], [3]]
    assert choices([Nested(None, 0, 9)], 1, 9) == []
