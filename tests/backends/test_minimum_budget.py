"""What a refusal and a report promise: the least that they name is enough, at 2 % more, on both engines."""

import pytest
import torch

import memopt
from tests.end_to_end import HUGGING_FACE, build, step

QUICK = {"aten": ("unet", "vit_b_16"), "inductor": ()}
CASES = [
    pytest.param(engine, name, marks=() if name in quick else pytest.mark.slow)
    for engine, quick in QUICK.items()
    for name in (*memopt.models.names(), *HUGGING_FACE)
]
# Of what the model takes without a plan: where most are planned, and few are refused.
SHARE = 0.8


def run(engine, name, budget):
    torch._dynamo.reset()
    model, inputs = build(name)
    compiled = memopt.compile(model, budget, backend=engine)
    step(compiled, inputs)
    return compiled.report


def assert_enough(engine, name, least):
    budget = int(least * 1.02)
    report = run(engine, name, budget)
    assert report.peak_bytes <= budget
    assert report.measured_peak_bytes is None or report.measured_peak_bytes <= budget


@pytest.mark.quick("aten-unet")
@pytest.mark.usefixtures("_compiler")
@pytest.mark.filterwarnings("ignore:FX graph cache copying of a large constant:UserWarning")
@pytest.mark.parametrize(("engine", "name"), CASES)
def test_what_a_refusal_or_a_report_names_is_enough(engine, name):
    with pytest.raises(memopt.BudgetError) as refused:
        run(engine, name, 1)
    assert_enough(engine, name, refused.value.minimum_bytes)
    try:
        least = run(engine, name, SHARE).minimum_bytes
    except memopt.BudgetError as error:
        least = error.minimum_bytes
    if least < refused.value.minimum_bytes:  # else it was shown already
        assert_enough(engine, name, least)
