"""A fraction is of one peak: the first training step's."""

import copy

from memopt.step.reference import Reference


def test_the_first_training_step_decides_for_all():
    reference = Reference()
    reference.trains(1000, "step")
    reference.trains(5000, "a larger step")
    reference.infers(9000)
    assert reference.of(10) == reference.of(10_000) == 1000


def test_the_first_step_may_be_counted_anew():
    reference = Reference()
    reference.trains(1000, "step")
    reference.trains(1200, "step")
    assert reference.of(10) == 1200


def test_a_step_that_trains_more_parameters_decides_anew():
    """Layers were unfrozen: the step with all of them was refused, by a fraction of that of the head."""
    reference = Reference()
    reference.trains(1000, "the head")
    reference.loops(900)
    reference.trains_more()
    reference.trains(5000, "all")
    assert reference.of(10) == 5000
    reference.trains(7000, "a larger step")
    assert reference.of(10) == 5000
    reference.trains_more()
    reference.trains(200, "all, of a smaller batch")
    assert reference.of(10) == 900, "as was seen before"


def test_inference_alone_goes_by_the_largest_call():
    reference = Reference()
    reference.infers(500)
    assert reference.of(300) == 500 and reference.of(700) == 700


def test_what_the_first_steps_take_in_their_loop_may_be_more():
    reference = Reference()
    reference.loops(5000)  # no step was planned yet
    reference.trains(1000, "step")
    reference.loops(900)
    assert reference.of(10) == 1000
    reference.loops(1300)
    reference.loops(1100)  # as the second step begins
    reference.loops(9000)  # a later one
    assert reference.of(10) == 1300


def test_a_step_planned_anew_keeps_what_was_seen_and_counts_what_was_found_beside_it_once():
    reference = Reference()
    reference.trains(1000, "step")
    reference.loops(1300)
    reference.trains(1000, "step")
    assert reference.of(10) == 1300
    reference.trains(1600, "step")  # with what the loop holds in backward counted in forward, too
    assert reference.of(10) == 1300
    reference.adds(50)
    assert reference.of(10) == 1350
    reference.loops(1320)  # of a plan that was made before
    assert reference.of(10) == 1370
    reference.trains(1400, "step")
    reference.loops(1370)  # of one that counts the 50
    assert reference.of(10) == 1370
    reference.trains(2000, "more calls", 2)
    assert reference.of(10) == 2000
    reference.loops(2100)
    assert reference.of(10) == 2100


def test_a_step_of_more_calls_takes_what_was_seen_of_its_first_ones():
    reference = Reference()
    reference.trains(1000, "step")
    reference.loops(1300)
    reference.trains(1100, "more calls", 2)
    assert reference.of(10) == 1300
    reference.loops(1300, 2)
    assert reference.of(10) == 1300
    reference.trains(1500, "more calls", 3)
    assert reference.of(10) == 1500


def test_what_eager_takes_is_asked_for_until_no_step_decides_any_more():
    reference = Reference()
    assert not reference.is_fixed
    reference.trains(1000, "step")
    reference.whole = True
    for _ in range(3):
        assert not reference.is_fixed
        reference.loops(1000)
    assert reference.is_fixed


def test_a_call_that_failed_leaves_a_fraction_as_it_was():
    reference = Reference()
    before = copy.copy(reference)
    reference.trains(5_784, "failed")
    reference.return_to(before)
    assert reference.training is None
    reference.trains(1_960, "first")
    assert reference.of(0) == 1_960


def test_a_loss_that_was_supposed_goes_once_the_step_is_planned_with_what_was_seen():
    reference = Reference()
    reference.trains(1500, "step")
    reference.loops(1200)
    reference.trains(1100, "step")
    assert reference.of(10) == 1200


def test_calls_that_were_supposed_and_not_made_are_no_part_of_it():
    reference = Reference()
    reference.trains(2000, "of two calls")
    reference.has_fewer_calls(1100, 1)
    reference.trains(1150, "of one")
    assert reference.of(10) == 1100


def test_calls_that_were_seen_in_one_step_are_the_same_step_once_they_are_planned_together():
    reference = Reference()
    reference.trains(1000, "of one")
    reference.loops(1800, 2)
    reference.trains(1900, "of two", 2)
    assert reference.of(10) == 1800
    reference.trains(2500, "of three", 3)
    assert reference.of(10) == 2500


def test_what_was_supposed_of_the_first_step_goes_as_soon_as_that_is_seen():
    reference = Reference()
    reference.trains(1500, ("session", ("graph",)))
    reference.loops(1200, graphs=("another graph",))
    assert reference.of(10) == 1500
    reference.loops(1100, graphs=("graph",))
    assert reference.decided_by(("graph",)) and reference.of(10) == 1200  # the most of what was seen
    reference.trains(1500, ("session anew", ("graph",)))
    assert reference.of(10) == 1200


def test_what_eager_holds_whatever_its_graphs_take_stays():
    reference = Reference()
    reference.trains(1500, ("session", ("graph",)))
    reference.rests(1300)
    reference.loops(1100, graphs=("graph",))
    assert reference.of(10) == 1300
    reference.adds(50)
    reference.loops(1100, graphs=("graph",))
    assert reference.of(10) == 1350


def test_a_step_that_is_supposed_to_take_more_takes_that_until_it_is_seen():
    reference = Reference()
    reference.trains(1000, ("session", ("graph",)))
    reference.supposes(2000)
    reference.trains(1000, ("session", ("graph",)))
    assert reference.of(10) == 2000
    reference.trains(1800, ("session", ("second",)), 2)
    assert reference.of(10) == 2000
    reference.loops(1750, 2, ("graph", "second"))
    assert reference.of(10) == 1750


def test_a_step_that_begins_with_gradients_takes_them_too_once_and_until_it_is_seen():
    reference = Reference()
    reference.trains(1000, ("session", ("graph",)))
    assert not reference.begins_with_gradients(1200, 100)  # no step was seen
    reference.loops(900, graphs=("graph",))
    assert reference.begins_with_gradients(1200, 100) and reference.of(10) == 1000
    assert not reference.begins_with_gradients(1200, 100)
    reference.loops(950, graphs=("adds",))
    assert reference.of(10) == 950


def test_a_step_that_begins_with_gradients_takes_no_more_than_it_was_counted_to():
    reference = Reference()
    reference.trains(1000, ("session", ("graph",)))
    reference.loops(1000, graphs=("graph",))
    assert reference.begins_with_gradients(1040, 100) and reference.of(10) == 1040
