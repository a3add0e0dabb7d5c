"""Random programs through every pass, the pipelines, the real captures and `memopt.compile`: all equal to eager."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, seed, settings

import memopt
from memopt.backends.aten import emit
from memopt.capture.export import from_module
from memopt.capture.joint import constants_to_attributes
from memopt.pass_manager import Pass, PassManager, PassResult
from memopt.passes.checkpoint import Checkpoint
from memopt.program import InputKind, Program
from tests.generate import recipes
from tests.instructions import Recipe, RecipeModule, Step, draws_in_vain, leaves_of
from tests.joint import Body, compile_step, exact_step, joint_arguments, results_of, step_results
from tests.oracle import NOISY_RUNS, Bound, arguments, program_of, same_bits, within

# Chunks, and examples in each: some 250 in all, then 1,000, and 50,000.
CI = {"passes": (3, 50), "training": (2, 25), "export": (2, 15), "compile": (2, 10)}
MORE = {"passes": (3, 250), "training": (2, 100), "export": (2, 30), "compile": (2, 20)}
LONG = {"passes": (40, 900), "training": (20, 650), "export": (1, 500), "compile": (1, 500)}


def each_pass() -> list[Pass]:
    """Every pass of the pipelines, once."""
    found = {type(item): item for item in (*memopt.INFERENCE, *memopt.TRAINING)}
    return list(found.values())


def explore(check: Callable[[Recipe], None], chunk: int, examples: int, training: bool = False) -> None:
    """Run `check` on `examples` random recipes, the same ones at every run."""

    @seed(chunk)
    @settings(
        max_examples=examples,
        database=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(recipes(training=training))
    def run(recipe: Recipe) -> None:
        check(recipe)

    run()


def chunks(name: str) -> Any:
    """Parameters (chunk, examples): the regular ones, then more of these and the long ones behind `slow`."""
    regular, more, long = CI[name], MORE[name], LONG[name]
    rows = [pytest.param(chunk, regular[1]) for chunk in range(regular[0])]
    rows += [pytest.param(chunk, more[1], marks=pytest.mark.slow) for chunk in range(more[0])]
    rows += [pytest.param(1000 + chunk, long[1], marks=pytest.mark.slow) for chunk in range(long[0])]
    return pytest.mark.parametrize(("chunk", "examples"), rows)


# -- what must hold of every rewrite --------------------------------------------------------------------------------


def rewritten(item: Pass, program: Program) -> Program:
    """Apply one pass and check all that its result says about itself."""
    before = str(program.graph)
    result = item.run(program)
    assert str(program.graph) == before, f"{item.name} edited the program that it was given"
    assert (result.program is not program) == bool(result.changes), f"{item.name}: changes and program disagree"
    new = result.program
    new.check()
    check_names(item, program, result)
    kept = [entry for entry in program.inputs if entry.kind is not InputKind.CONSTANT]
    assert [entry for entry in new.inputs if entry.kind is not InputKind.CONSTANT] == kept, (
        f"{item.name}: inputs changed"
    )
    assert new.outputs == program.outputs and new.forward_outputs == program.forward_outputs
    return new


def check_names(item: Pass, program: Program, result: PassResult) -> None:
    """Changes and refusals name nodes: of the old or new program, or what another change of the same run made."""
    names = {node.name for node in (*program.graph.nodes, *result.program.graph.nodes)}
    names |= {name for change in result.changes for name in change.after if name not in change.before}
    for change in result.changes:
        assert {*change.before, *change.after} <= names and change.summary, f"{item.name}: {change}"
    for refusal in result.refusals:
        assert refusal.node in names and refusal.reason, f"{item.name}: {refusal}"


def run_program(program: Program, recipe: Recipe) -> tuple[list[Any], Any]:
    """The program's results, and which of them share storage with each other or with an input.

    Here and below the CPU's generator is seeded alone: `torch.manual_seed` asks every kind of device, for milliseconds.
    """
    given = arguments(program, recipe)
    torch.default_generator.manual_seed(0)
    found = program.run(*given)
    return found, sharing(found, given)


def run_emitted(program: Program, recipe: Recipe) -> tuple[list[Any], Any]:
    """The same on the aten backend, in place where annotated; what the caller passed must stay as it was."""
    given, spare = arguments(program, recipe), arguments(program, recipe)
    state = {name: value.clone() for name, value in program.state.items()}
    function = emit(constants_to_attributes(program))
    torch.default_generator.manual_seed(0)
    found = list(function(list(given)))
    assert same_bits(given, spare) is None, "an input was overwritten"
    assert all(torch.equal(value, state[name]) for name, value in program.state.items()), "a constant was overwritten"
    return found, sharing(found, given)


def sharing(outputs: Sequence[Any], inputs: Sequence[Any]) -> list[tuple[int, int]]:
    """Pairs of outputs, and of outputs and inputs, that share storage: writing one would change the other."""
    keys = [value.untyped_storage()._cdata for value in (*outputs, *inputs)]
    return [(i, j) for i in range(len(outputs)) for j in range(i + 1, len(keys)) if keys[i] == keys[j]]


def check_rewrite(item: Pass, program: Program, before: tuple[list[Any], Any], recipe: Recipe, bound: Bound) -> Program:
    """One pass on an inference program: its results, run either way, are what the program's were."""
    new = rewritten(item, program)
    if new is program:
        return new
    after, emitted = run_program(new, recipe), run_emitted(new, recipe)
    assert layouts(after[0]) == layouts(before[0]), f"{item.name}: strides of an output changed"
    assert after[1] == before[1], f"{item.name}: outputs share storage otherwise than before"
    assert emitted[1] == before[1], f"{item.name}, on the aten backend: outputs share storage otherwise than before"
    if item.tolerance == 0.0:
        assert same_bits(after[0], before[0]) is None, f"{item.name}: {same_bits(after[0], before[0])}"
    else:
        bound.check(after[0])
    difference = same_bits(emitted[0], after[0])
    assert difference is None, f"{item.name}, on the aten backend: {difference}"
    return new


def layouts(values: Sequence[Any]) -> list[Any]:
    """Strides of the dimensions that have any: kernels choose the others freely."""
    return [[s for s, n in zip(value.stride(), value.shape, strict=True) if n > 1] for value in values]


# -- the tests ------------------------------------------------------------------------------------------------------


def inference_matches(recipe: Recipe) -> None:
    program = program_of(recipe)
    program.check()
    bound = Bound(recipe, program)
    before = run_program(program, recipe)
    bound.check(before[0])  # what torch decomposes may round otherwise than its own composite kernels
    for item in each_pass():
        check_rewrite(item, program, before, recipe, bound)
    for item in memopt.INFERENCE:
        new = check_rewrite(item, program, before, recipe, bound)
        program, before = new, before if new is program else run_program(new, recipe)


def training_matches(recipe: Recipe) -> None:
    def pipeline(program: Program) -> Program:
        args = joint_arguments(recipe, program)
        torch.default_generator.manual_seed(0)
        expected = program.run(*args)
        for item in each_pass():
            check_joint(item, program, args, expected)
        check_least_memory(program, args, expected)
        for item in memopt.TRAINING:
            program = check_joint(item, program, args, expected)
        return program

    check_step(recipe, step_results(recipe, compile_step(recipe, pipeline)))


@pytest.mark.quick("2-50")
@chunks("passes")
def test_each_pass_and_the_pipeline_compute_what_eager_does(chunk: int, examples: int) -> None:
    explore(inference_matches, chunk, examples)


@pytest.mark.quick("0-25")
@chunks("training")
def test_training_steps_compute_what_eager_does(chunk: int, examples: int) -> None:
    explore(training_matches, chunk, examples, training=True)


def check_joint(item: Pass, program: Program, args: Sequence[Any], expected: Sequence[Any]) -> Program:
    new = rewritten(item, program)
    if new is not program:
        torch.default_generator.manual_seed(0)
        difference = same_bits(new.run(*args), expected)
        assert difference is None, f"{item.name}: {difference}"
    return new


def check_least_memory(program: Program, args: Sequence[Any], expected: Sequence[Any]) -> None:
    """Recompute for the least peak that a short search finds."""
    try:
        check_joint(Checkpoint(0, seconds=5.0), program, args, expected)
    except ValueError as error:
        least = int(re.search(r"the least peak is (\d+)", str(error)).group(1))
        check_joint(Checkpoint(least, seconds=5.0), program, args, expected)


def check_step(recipe: Recipe, found: Sequence[Any]) -> None:
    """Outputs, gradients and buffers of one step: bitwise eager's, else within the float64 bound."""
    expected = step_results(recipe, Body(recipe))
    if same_bits(found, expected) is None:
        return
    exact = exact_step(recipe, None)
    noisy = [exact_step(recipe, noise) for noise in range(1, NOISY_RUNS + 1)]
    for index, value in enumerate(found):
        within(value, expected[index], exact[index], [run[index] for run in noisy], f"result {index}")


def assume_all_is_drawn(recipe: Recipe) -> None:
    """Reject what torch's captures do not draw as eager does."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        assume(not draws_in_vain(recipe, leaves_of(recipe)))


@pytest.mark.quick("0-15")
@chunks("export")
def test_exported_modules_compute_what_eager_does(chunk: int, examples: int) -> None:
    def check(recipe: Recipe) -> None:
        assume_all_is_drawn(recipe)
        module = RecipeModule(recipe)
        program = from_module(module, module.user)
        new, _ = PassManager(memopt.INFERENCE).run(program)
        torch.default_generator.manual_seed(0)
        found = new.run(*exported_arguments(new, module))
        Bound(recipe).check(
            [value for value, entry in zip(found, new.outputs, strict=True) if entry.kind.value == "user"]
        )

    explore(check, chunk, examples)


def exported_arguments(program: Program, module: RecipeModule) -> list[Any]:
    users = iter(module.user)
    return [
        program.state[entry.name].clone() if entry.name in program.state else next(users)
        for entry in program.inputs
        if entry.kind is not InputKind.CONSTANT
    ]


@pytest.mark.quick("1-10")
@chunks("compile")
def test_compiled_modules_compute_what_eager_does(chunk: int, examples: int) -> None:
    """Half of the examples train, half infer: each through Dynamo, planning and the aten backend."""

    def train(recipe: Recipe) -> None:
        assume_all_is_drawn(recipe)
        torch._dynamo.reset()
        module = RecipeModule(recipe, trainable=True)
        compiled = memopt.compile(module, backend="aten")
        check_step(recipe, module_step(recipe, module, compiled))

    def infer(recipe: Recipe) -> None:
        assume_all_is_drawn(recipe)
        torch._dynamo.reset()
        module = RecipeModule(recipe).eval()
        compiled = memopt.compile(module, backend="aten")
        torch.default_generator.manual_seed(0)
        with torch.no_grad():
            found = list(compiled(*module.user))
        bound = Bound(recipe)
        bound.check(found)

    explore(train, chunk, examples // 2, training=True)
    explore(infer, chunk, examples - examples // 2)


def module_step(recipe: Recipe, module: RecipeModule, function: Callable[..., Any]) -> list[Any]:
    """What `step_results` returns, of a module: outputs, gradients by leaf, buffers by leaf."""
    torch.default_generator.manual_seed(0)
    leaves = [None if name is None else getattr(module, name) for name in module.names]
    return results_of(recipe, leaves, function(*module.user))


# -- programs that once went wrong ----------------------------------------------------------------------------------

_SQUARE = (
    Step("user", (), ((4, 4), "float32", "signed", 0)),
    Step("parameter", (), ((4, 4), "float32", "signed", 0)),
    Step("mul", (0, 1)),
)
_TRAINING = {
    "a view of a parameter, returned twice: its tangents are no views": Recipe(
        (
            Step("user", (), ((2, 3), "float32", "signed", 0)),
            Step("parameter", (), ((2, 3), "float32", "signed", 0)),
            Step("mul", (0, 1)),
            Step("buffer", (), ((3,), "float32", "signed", 0)),
            Step("buffer", (), ((3,), "float32", "positive", 0)),
            Step("parameter", (), ((3,), "float32", "positive", 0)),
            Step("parameter", (), ((3,), "float32", "signed", 0)),
            Step("batch_norm_train", (2, 3, 4, 5, 6)),
            Step("unbind", (6,), (0,)),
        ),
        (10, 10),
    ),
    "a view of a detached tensor, returned beside it": Recipe(
        (*_SQUARE, Step("mm", (2, 2)), Step("detach", (3,)), Step("reshape", (4,), ((16,),))), (5, 3)
    ),
    "only views of a parameter": Recipe((*_SQUARE, Step("view", (1,), ((16,),))), (3, 3)),
}
_INFERENCE = {
    "one result of several, taken twice": Recipe(
        (
            *_SQUARE,
            Step("layer_norm", (2,)),
            Step("layer_norm", (2,)),
            Step("maximum", (0, 4)),
            Step("maximum", (0, 4)),
            Step("dropout", (6,), (0.5, "float32")),
        ),
        (7, 3),
    ),
    "a relu that changes nothing, whose view is returned beside what it read": Recipe(
        (*_SQUARE, Step("relu", (2,)), Step("relu", (3,)), Step("relu", (4,)), Step("view", (5,), ((16,),))), (6, 3)
    ),
    "a view of what is transposed around a size of 1, which the fake mode would make of the input, too": Recipe(
        (
            Step("user", (), ((2, 1, 3), "float32", "strided", 0)),
            Step("transpose", (0,), (0, 2)),
            Step("view", (1,), ((6,),)),
        ),
        (2,),
    ),
    "a result of a batch norm that lies otherwise than the fake mode has it, written over": Recipe(
        (
            Step("user", (), ((2, 3), "float32", "strided", 0)),
            Step("relu", (0,)),
            Step("buffer", (), ((3,), "float32", "signed", 0)),
            Step("buffer", (), ((3,), "float32", "positive", 0)),
            Step("parameter", (), ((3,), "float32", "positive", 0)),
            Step("parameter", (), ((3,), "float32", "signed", 0)),
            Step("batch_norm", (1, 2, 3, 4, 5)),
            Step("copy_", (6, 1)),
        ),
        (7,),
    ),
    "three equal values, of which one and a view of another are returned": Recipe(
        (
            Step("user", (), ((3,), "float32", "signed", 0)),
            *(Step("rsub", (0,), (0,)),) * 3,
            Step("squeeze", (3,)),
            Step("relu", (4,)),
            Step("relu", (2,)),
        ),
        (6, 1, 4),
    ),
    "a constant that a pass makes": Recipe((*_SQUARE, Step("bernoulli", (2,), (0.5, "float32"))), (3,)),
}


@pytest.mark.parametrize("recipe", _TRAINING.values(), ids=_TRAINING)
def test_kept_training_programs(recipe: Recipe) -> None:
    training_matches(recipe)


@pytest.mark.parametrize("recipe", _INFERENCE.values(), ids=_INFERENCE)
def test_kept_inference_programs(recipe: Recipe) -> None:
    inference_matches(recipe)
