"""What is allowed for before it was seen: in steps, less of it."""

from memopt.memory.tangents import Tangents
from memopt.step.loss_allowance import LossAllowance

LOSS = Tangents(early=10, loss=300, usual=200)


def test_the_usual_loss_is_allowed_for_before_none_is():
    allowance = LossAllowance()
    allowance.counts(LOSS, whole=False)
    assert allowance.tangents == LOSS
    assert allowance.lessens(seen=False, several=False) and allowance.tangents == Tangents(10, 200, 200)
    assert allowance.lessens(seen=False, several=False) and allowance.tangents == Tangents()
    assert not allowance.allows and not allowance.lessens(seen=False, several=False)


def test_beside_several_graphs_the_usual_loss_is_always_allowed_for():
    allowance = LossAllowance()
    allowance.counts(LOSS, whole=False)
    assert allowance.lessens(seen=False, several=True)
    assert not allowance.lessens(seen=False, several=True) and allowance.tangents.loss == 200
    allowance.counts(LOSS, whole=False)
    assert allowance.tangents.loss == 200, "it stays so"


def test_of_all_of_eagers_own_peak_the_usual_loss_is_counted_with_it():
    allowance = LossAllowance()
    allowance.counts(LOSS, whole=True)
    assert allowance.tangents.loss == 200


def test_a_loss_that_was_seen_is_not_lessened():
    allowance = LossAllowance()
    allowance.counts(LOSS, whole=False)
    assert not allowance.lessens(seen=True, several=False) and allowance.tangents == LOSS


def test_of_what_is_left_to_other_models_half_is_left_each_time():
    allowance, left = LossAllowance(), []
    allowance.reserves(800)
    while allowance.lessens(seen=False, several=False):
        allowance.reserves(800 if allowance.allows else 0)
        left.append(allowance.reserved)
    assert left == [400, 200, 100, 0]


def test_eager_holds_the_usual_loss_whether_it_is_allowed_for_or_not():
    """A fraction was of less as soon as nothing was allowed for, and what kept it before did not keep that."""
    allowance = LossAllowance()
    allowance.counts(LOSS, whole=False)
    while allowance.lessens(seen=False, several=False):
        allowance.counts(LOSS if allowance.allows else Tangents(), whole=False)
        assert allowance.usual == 200
