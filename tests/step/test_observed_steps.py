"""Which steps of a loop are observed."""

from memopt.step.observed_steps import FIRST_STEPS, is_observed


def test_the_first_steps_and_then_ever_fewer():
    observed = [step for step in range(1, 100) if is_observed(step)]
    assert observed[:FIRST_STEPS] == list(range(1, FIRST_STEPS + 1))
    assert observed[FIRST_STEPS:] == [8, 16, 32, 64]
