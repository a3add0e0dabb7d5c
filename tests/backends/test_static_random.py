"""Random programs in one arena: equal to eager, inputs untouched, results held across calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

import memopt
from memopt.backends.static import StaticBackend, plan_for
from memopt.pass_manager import PassManager
from tests.generate import recipes
from tests.instructions import Recipe
from tests.oracle import Bound, arguments, program_of, same_bits

CHUNKS: list[Any] = [(chunk, 40) for chunk in range(2)]
CHUNKS += [pytest.param(1000 + chunk, 600, marks=pytest.mark.slow) for chunk in range(4)]


def matches(recipe: Recipe) -> None:
    captured = program_of(recipe)
    bound = Bound(recipe, captured)
    for program in (captured, PassManager(memopt.INFERENCE, verify=False).run(captured)[0]):
        given, spare = arguments(program, recipe), arguments(program, recipe)
        state = {name: value.clone() for name, value in program.state.items()}
        function = StaticBackend().bind(program)
        torch.default_generator.manual_seed(0)
        found = function(list(given))
        bound.check(list(found))
        kept = [value.clone() for value in found]
        arena = function._arena.memory.untyped_storage()
        assert all(value.untyped_storage()._cdata != arena._cdata for value in found), "a result lives in the arena"
        again = [torch.zeros_like(value) for value in arguments(program, recipe)]
        function(again)
        assert same_bits(found, kept) is None, "a held result was overwritten"
        assert same_bits(given, spare) is None, "an input was overwritten"
        assert all(torch.equal(value, state[name]) for name, value in program.state.items()), "a constant changed"


@pytest.mark.parametrize(("chunk", "examples"), CHUNKS)
def test_random_programs_compute_what_eager_does(chunk: int, examples: int) -> None:
    @seed(chunk)
    @settings(
        max_examples=examples,
        database=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        phases=[Phase.generate],  # shrinking takes minutes; a failing recipe prints as it is
    )
    @given(recipes(mean_steps=14))
    def run(recipe: Recipe) -> None:
        matches(recipe)

    run()


@seed(7)
@settings(max_examples=60, database=None, suppress_health_check=list(HealthCheck))
@given(recipes(mean_steps=20, random=False))
def test_plans_of_random_programs_are_checked(recipe: Recipe) -> None:
    program = program_of(recipe)
    plan, _ = plan_for(program)
    plan.check()
    assert plan.arena_bytes >= plan.lower_bound
