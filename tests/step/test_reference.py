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


def test_inference_alone_goes_by_the_largest_call():
    reference = Reference()
    reference.infers(500)
    assert reference.of(300) == 500 and reference.of(700) == 700


def test_what_the_loop_holds_around_the_first_steps_belongs_to_them():
    reference = Reference()
    reference.loops(5000, 9000)  # no step was planned yet
    reference.trains(1000, "step")
    reference.loops(0, 900)
    assert reference.of(10) == 1000
    reference.loops(300, 1100)
    reference.loops(200, 1000)  # as the second step begins
    reference.loops(8000, 9000)  # a later one
    assert reference.of(10) == 1300


def test_the_most_between_calls_and_backward_may_be_more_than_the_model_s_own():
    reference = Reference()
    reference.trains(1000, "step")
    reference.loops(0, 1400)
    reference.trains(1000, "step")
    assert reference.of(10) == 1400


def test_a_step_planned_anew_keeps_what_was_seen_around_it_and_counts_it_once():
    reference = Reference()
    reference.trains(1000, "step")
    reference.loops(300, 0)
    reference.trains(1000, "step")
    assert reference.of(10) == 1300
    reference.trains(1300, "step")
    assert reference.of(10) == 1300
    reference.adds(50)
    assert reference.of(10) == 1350
    reference.trains(2000, "more calls", 2)
    assert reference.of(10) == 2000


def test_a_call_that_failed_leaves_a_fraction_as_it_was():
    reference = Reference()
    before = copy.copy(reference)
    reference.trains(5_784, "failed")
    reference.return_to(before)
    assert reference.training is None
    reference.trains(1_960, "first")
    assert reference.of(0) == 1_960
