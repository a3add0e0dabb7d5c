"""Passes that remember what they made of a program."""

import pytest

from memopt.pass_manager import Pass, PassError, PassManager, PassResult
from memopt.passes.eliminate_dead import EliminateDead
from memopt.step.pass_memo import PassMemo
from tests.step.test_planned import program


class Counted(Pass):
    name, tolerance, lowers_floor = "counted", 2.0, True

    def __init__(self):
        self.runs = 0

    def run(self, program):
        self.runs += 1
        return PassResult(program.copy().finish())


def test_a_pass_runs_once_for_each_program_and_says_how_long_that_took():
    item, kept = Counted(), PassMemo()
    one, other = program(), program()
    first, (record,) = PassManager(kept.of([item]), False).run(one)
    again, (later,) = PassManager(kept.of([item]), True).run(one)
    assert again is first and item.runs == 1
    assert later.seconds == record.seconds > 0 and (later.name, record.evidence) == ("counted", None)
    assert later.evidence is not None, "what was not proved then is proved now"
    assert PassManager(kept.of([item]), False).run(other)[0] is not first and item.runs == 2


def test_stand_ins_are_told_apart_by_their_pass_and_are_like_it():
    item, kept = Counted(), PassMemo()
    mine, other = kept.of([item, EliminateDead()])
    assert kept.of([item]) == [mine] and mine is not other
    assert (mine.name, mine.tolerance, mine.lowers_floor) == ("counted", 2.0, True)


def test_what_is_no_result_is_refused_as_ever():
    class Wrong(Counted):
        def run(self, program):
            return program

    with pytest.raises(PassError, match="not a PassResult"):
        PassManager(PassMemo().of([Wrong()]), False).run(program())
