"""What a refusal promises: the least that it names is enough, at 2 % more, for every model and on both engines."""

import pytest

import memopt
from tests.end_to_end import build, step

QUICK = {"aten": ("unet", "vit_b_16"), "inductor": ()}
CASES = [
    pytest.param(engine, name, marks=() if name in quick else pytest.mark.slow)
    for engine, quick in QUICK.items()
    for name in memopt.models.names()
]


def run(engine, name, budget):
    model, inputs = build(name)
    compiled = memopt.compile(model, budget, backend=engine)
    step(compiled, inputs)
    return compiled.report


@pytest.mark.usefixtures("_compiler")
@pytest.mark.filterwarnings("ignore:FX graph cache copying of a large constant:UserWarning")
@pytest.mark.parametrize(("engine", "name"), CASES)
def test_what_a_refusal_names_is_enough(engine, name):
    with pytest.raises(memopt.BudgetError) as refused:
        run(engine, name, 1)
    budget = int(refused.value.minimum_bytes * 1.02)
    report = run(engine, name, budget)
    assert report.peak_bytes <= budget
    assert report.measured_peak_bytes is None or report.measured_peak_bytes <= budget
