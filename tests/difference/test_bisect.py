"""The search alone: pipelines and checks of plain numbers."""

import pytest

from memopt.difference.bisect import BrokenBefore, NothingToFind, Pipeline, Rewrite, Split, Verdict, bisect


class Adds(Split):
    """A pass over lists of numbers that appends some; `joined` of them can only be made together."""

    def __init__(self, given, added, joined=frozenset()):
        self.given, self.added, self.joined = given, added, joined

    @property
    def count(self):
        return len(self.added)

    def first(self, number):
        return None if number in self.joined else [*self.given, *self.added[:number]]

    def only(self, number):
        return [*self.given, self.added[number - 1]]

    def describe(self, number, alone):
        return Rewrite((), (str(self.added[number - 1]),), (), number, self.count, alone, "")


def pipeline(*passes, joined=frozenset(), splits=True):
    def apply(index, given):
        if passes[index] is None:
            raise RuntimeError("no such thing")
        return [*given, *passes[index]]

    def split(index, before, after):
        return [Adds(before, passes[index], joined)] if splits else []

    return Pipeline([f"pass{number}" for number in range(1, len(passes) + 1)], apply, split)


def without(*bad):
    """Fails where all of the numbers are in the list; keeps count."""

    def check(subject, stage):
        seen.append(stage)
        return Verdict(not all(number in subject for number in bad), f"{len(subject)} numbers")

    seen: list[str] = []
    check.seen = seen
    return check


@pytest.mark.parametrize("bad", range(1, 25))
def test_every_rewrite_of_every_pass_is_found(bad):
    passes = [tuple(range(6 * index + 1, 6 * index + 7)) for index in range(4)]
    check = without(bad)
    found = bisect([], pipeline(*passes), check)
    number = (bad - 1) // 6 + 1
    assert (found.name, found.number, found.count) == (f"pass{number}", number, 4)
    assert found.rewrite.after == (str(bad),) and found.rewrite.alone
    assert (found.rewrite.number, found.rewrite.count) == ((bad - 1) % 6 + 1, 6)
    assert found.checks == len(check.seen) <= 9


def test_few_checks_for_many():
    passes = [tuple(range(100 * index + 1, 100 * index + 101)) for index in range(12)]
    assert bisect([], pipeline(*passes), without(777)).checks <= 2 + 4 + 1 + 7 + 1


def test_a_rewrite_that_fails_only_with_others():
    found = bisect([], pipeline((1, 2, 3, 4)), without(2, 4))
    assert found.rewrite.after == ("4",) and not found.rewrite.alone


def test_rewrites_that_cannot_be_made_alone():
    found = bisect([], pipeline((1, 2, 3, 4, 5, 6), joined={3, 4}), without(4))
    assert found.rewrite is None and found.reason == "its rewrites 3 to 5 can only be made together"
    found = bisect([], pipeline((1, 2, 3), joined={3}), without(3))
    assert found.reason == "the check fails after the pass, but not after its rewrites one by one"


@pytest.mark.parametrize("made", [pipeline((1, 2), splits=False), pipeline((1, 2))])
def test_a_pass_that_cannot_be_taken_apart(made):
    if made.splits(0, [], []):
        made.splits(0, [], [])[0].added = ()
        made = Pipeline(made.names, made.apply, lambda index, before, after: [Adds(before, ())])
    found = bisect([], made, without(1))
    assert found.name == "pass1" and found.rewrite is None and "order of the nodes" in found.reason


def test_nothing_to_find_and_broken_before():
    with pytest.raises(NothingToFind):
        bisect([], pipeline((1,), (2,)), without(3))
    with pytest.raises(NothingToFind):
        bisect([], pipeline(), without(3))
    with pytest.raises(BrokenBefore, match="1 numbers"):
        bisect([3], pipeline((1,)), without(3))


def test_a_pass_that_raises():
    found = bisect([], pipeline((1,), None, (3,)), without(3))
    assert (found.name, found.words) == ("pass2", "RuntimeError: no such thing")
    assert bisect([], pipeline((1,), None, (3,)), without(1)).name == "pass1"
