"""Evidence: what is equal, how far apart what is not may be, figures computed by hand, and what cannot be proved."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch

from memopt import evidence
from memopt.difference.regions import differing_regions
from memopt.evidence import Evidence, EvidenceError, prove
from memopt.program import InputKind, Program
from tests.passes.build import trace

aten = torch.ops.aten
EPS = 2.0**-23  # of float32


def of(function: Callable, *weights: float | torch.Tensor) -> Program:
    """The program of a function of parameters with these values, so that its numbers are known."""
    tensors = [torch.as_tensor(weight) for weight in weights]
    return trace(
        lambda *args: (function(*args),), *tensors, kinds=dict.fromkeys(range(len(tensors)), InputKind.PARAMETER)
    )


def compare(
    before: Callable,
    after: Callable,
    *weights: float | list[float] | torch.Tensor,
    tolerance: float = 0.0,
    verify: bool | str = True,
) -> Evidence:
    return prove(of(before, *weights), of(after, *weights), tolerance, verify)


def user(function: Callable, *tensors: torch.Tensor) -> Program:
    return trace(lambda *args: (function(*args),), *tensors)


# -- exact ----------------------------------------------------------------------------------------------------------


def test_equal_bits_are_exact() -> None:
    found = compare(lambda w: w * 2, lambda w: w + w, [1.0, -3.0, math.nan, math.inf])
    assert found == Evidence("regions", 1, 1, 0.0, 0.0, 1.0)


def test_what_is_the_same_by_construction_needs_no_run() -> None:
    program = of(lambda w: w.sin() * 2, [1.0])
    assert prove(program, program.copy(), 0.0, True) == Evidence("regions", 0, 0, 0.0, 0.0, 1.0)


def test_one_unit_in_the_last_place_is_a_difference() -> None:
    with pytest.raises(EvidenceError, match=r"^mul: results differ by up to 4\.77e-07 \(1 ulp\), bitwise equality"):
        compare(lambda w: w * 1, lambda w: w * (1 + EPS), [1.0, 4.0])


def test_nodes_of_both_programs_are_named_where_names_differ() -> None:
    with pytest.raises(EvidenceError, match=r"^sub \(before: mul\): results differ by up to 1 "):
        compare(lambda w: w * 2, lambda w: w - 1, [-2.0])


def test_zeros_have_signs() -> None:
    def minus(w: torch.Tensor) -> torch.Tensor:
        return w - w

    with pytest.raises(EvidenceError, match=r"differ by up to 0 \(0 ulp\)"):
        compare(lambda w: w * 0, minus, [-1.0])
    assert compare(lambda w: w * 0, minus, [1.0]).max_abs_error == 0
    assert compare(lambda w: w * 0, minus, [-1.0], tolerance=1.0).max_abs_error == 0


@pytest.mark.parametrize("tolerance", [0.0, 100.0])
def test_integers_kinds_and_complex_numbers_must_be_equal_always(tolerance: float) -> None:
    with pytest.raises(EvidenceError, match="differ by up to 1 "):  # in one place
        compare(lambda w: w * 2, lambda w: w + 2, torch.tensor([2, 3]), tolerance=tolerance)
    with pytest.raises(EvidenceError, match=r"^torch.float32\[1\] became torch.float64\[1\]"):
        compare(lambda w: w * 2, lambda w: w.double(), [1.0], tolerance=tolerance)
    with pytest.raises(EvidenceError, match=r"^torch.float32\[2\] became torch.float32\[1, 2\]"):
        compare(lambda w: w * 2, lambda w: w[None], [1.0, 2.0], tolerance=tolerance)
    numbers = torch.tensor([1 + 2j, complex(math.nan, 1)])
    assert compare(lambda w: w * 2, lambda w: w + w, numbers, tolerance=tolerance).max_abs_error == 0
    with pytest.raises(EvidenceError, match="bitwise equality"):
        compare(lambda w: w * 2, lambda w: w.conj() * 2, numbers, tolerance=tolerance)


# -- within a tolerance ---------------------------------------------------------------------------------------------


def test_rounding_of_exact_results_is_allowed_up_to_a_floor() -> None:
    # Before is exact; the floor is 8 units in the last place of the largest value: 8 * 4 * EPS.
    found = compare(lambda w: w * 1, lambda w: w * (1 + 8 * EPS), [1.0, 4.0], tolerance=1.0)
    assert (found.max_abs_error, found.max_ulp, found.error_ratio) == (32 * EPS, 8.0, 1.0)
    with pytest.raises(EvidenceError, match=r"^mul: float64 error 4\.29e-06 after, 0 before: more than 100 times"):
        compare(lambda w: w * 1, lambda w: w * (1 + 9 * EPS), [1.0, 4.0], tolerance=100.0)


def test_in_float64_there_is_no_more_exact_reference() -> None:
    # Where large terms cancel, both sides are off by many units of the small result.
    def with_rounding(units: float) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda w: w * (1 + units * 2.0**-52)

    ones = torch.ones(2, dtype=torch.float64)
    assert compare(lambda w: w * 1, with_rounding(256), ones, tolerance=1.0).max_ulp == 256
    with pytest.raises(EvidenceError, match="float64 error"):
        compare(lambda w: w * 1, with_rounding(257), ones, tolerance=100.0)


def test_the_error_may_grow_by_the_tolerance() -> None:
    # In float32 (2^-5 + 2^20) - 2^20 is 0: an error of 2^-5. After, 4 * 2^-5 is off by three times as much.
    def before(w: torch.Tensor) -> torch.Tensor:
        return (w + 2**20) - 2**20

    found = compare(before, lambda w: w * 4, [2.0**-5], tolerance=3.0)
    assert (found.max_abs_error, found.error_ratio) == (2.0**-3, 3.0)
    assert found.max_ulp == 2.0**-3 / torch.finfo(torch.float32).tiny
    with pytest.raises(EvidenceError, match=r"float64 error 0\.0938 after, 0\.0312 before: more than 2\.5 times"):
        compare(before, lambda w: w * 4, [2.0**-5], tolerance=2.5)


def test_what_is_better_than_before_has_ratio_one() -> None:
    # 1 + 2^-12 is 1 in float16; the reference does not round to float16, so after is exact.
    def before(w: torch.Tensor) -> torch.Tensor:
        return w.half().float()

    found = compare(before, lambda w: w * 1, [1 + 2.0**-12], tolerance=1.0)
    assert (found.max_abs_error, found.max_ulp, found.error_ratio) == (2.0**-12, 2.0**11, 1.0)


def test_nan_and_infinity_are_no_rounding() -> None:
    for before, after in ((torch.log, torch.abs), (torch.abs, torch.log)):
        with pytest.raises(EvidenceError, match="NaN where there was none, or the other way round"):
            compare(before, after, [-1.0, 2.0], tolerance=1e9)
    with pytest.raises(EvidenceError, match=r"^mul: infinite where it was not"):
        compare(lambda w: w * 2, lambda w: w * math.inf, [1.0], tolerance=1e9)
    with pytest.raises(EvidenceError, match=r"^mul: infinite where it was not"):
        compare(lambda w: w * 2, lambda w: w * -2, [math.inf], tolerance=1e9)
    assert compare(lambda w: w * 2, lambda w: w * (2 + 4 * EPS), [math.inf, 1.0], tolerance=1.0).max_ulp == 2.0
    # What overflowed before may overflow after, though the reference does not.
    large = torch.tensor([60000.0, 1.0], dtype=torch.float16)
    assert compare(lambda w: w * 2, lambda w: w * (2 + 2.0**-9), large, tolerance=1.0).max_abs_error == 2.0**-9


# -- what regions leave open ----------------------------------------------------------------------------------------


def test_outputs_that_are_no_values_are_compared_too() -> None:
    program = of(lambda w: w * 2, [1.0])
    dropped, number = program.copy(), program.copy()
    dropped.graph.output_node().args = ([None],)
    number.graph.output_node().args = ([3],)
    with pytest.raises(EvidenceError, match=r"^output 0: is None, was mul$"):
        prove(program, dropped.finish(), 0.0, True)
    assert prove(number, number.copy(), 0.0, True).regions == 0
    other = number.copy()
    other.graph.output_node().args = ([4],)
    with pytest.raises(EvidenceError, match=r"^output 0: is 4, was 3$"):
        prove(number, other, 0.0, True)


def test_an_input_keeps_its_value() -> None:
    program = of(lambda w: w * 2, [1.0])
    with pytest.raises(EvidenceError, match=r"^arg0_1: the value of this input is another"):
        prove(program, dataclasses.replace(program, state={program.inputs[0].name: torch.tensor([2.0])}), 9.0, True)
    same = dataclasses.replace(program, state={program.inputs[0].name: torch.tensor([1.0])})
    assert prove(program, same, 0.0, True).regions == 0


def test_inputs_outside_an_operations_domain_are_made_positive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "synthesize", lambda value: torch.full(value.shape, -2.0))
    programs = (user(torch.sqrt, torch.ones(3)), user(lambda x: x.sqrt() * 1.5, torch.ones(3)))
    with pytest.raises(EvidenceError, match=r"differ by up to 0\.791 "):  # half the root of |-2| + 0.5
        prove(*programs, 0.0, True)


def test_a_rewrite_may_rest_on_the_operations_before_it() -> None:
    program = user(lambda x: x.clamp(0, 6).relu() * 2, torch.ones(50))
    right, wrong = program.copy(), program.copy()
    for copy, operator in ((right, aten.clone.default), (wrong, aten.neg.default)):
        next(node for node in copy.calls if node.name == "relu").target = operator
        copy.finish().check()
    found = prove(program, right, 0.0, True)
    assert (found.regions, found.proved, found.max_abs_error) == (1, 1, 0.0)
    with pytest.raises(EvidenceError, match="bitwise equality"):
        prove(program, wrong, 0.0, True)


def test_regions_of_one_structure_are_run_three_times() -> None:
    def chain(twice: Callable) -> Callable:
        def function(x: torch.Tensor) -> torch.Tensor:
            for _ in range(5):
                x = twice(x).sin()
            return x

        return function

    found = prove(user(chain(lambda x: x * 2), torch.ones(3)), user(chain(lambda x: x * 2.0), torch.ones(3)), 0.0, True)
    assert (found.regions, found.proved, found.unproved) == (5, 3, ())


def test_full_runs_the_whole_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compare(lambda w: (w * 2).sin(), lambda w: (w + w).sin(), [1.0], verify="full")
    assert (found.scope, found.regions, found.proved) == ("program", 1, 2)
    monkeypatch.setattr(evidence, "differing_regions", lambda *_, **__: [])
    assert compare(lambda w: w * 2, lambda w: w * 3, [1.0]).proved == 0
    with pytest.raises(EvidenceError, match=r"^mul: results differ by up to 1 "):
        compare(lambda w: w * 2, lambda w: w * 3, [1.0], verify="full")


def test_regions_that_are_too_large_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "REGION_BYTES", 11)
    found = compare(lambda w: w * 2, lambda w: w * 3, [1.0])  # one input and two results of 4 bytes, read on both sides
    assert (found.regions, found.proved) == (1, 0)
    assert found.unproved == ("mul: the region takes 16 bytes, above 11",)
    monkeypatch.setattr(evidence, "REGION_BYTES", 16)
    with pytest.raises(EvidenceError, match="bitwise equality"):
        compare(lambda w: w * 2, lambda w: w * 3, [1.0])


def test_operations_that_refuse_made_up_inputs_are_reported() -> None:
    found = prove(
        user(lambda x: x.multinomial(1), torch.rand(64)),
        user(lambda x: x.multinomial(1, True), torch.rand(64)),
        0,
        True,
    )
    (line,) = found.unproved
    assert line.startswith("multinomial: cannot be run on made-up inputs (") and (found.regions, found.proved) == (1, 0)


# -- random numbers -------------------------------------------------------------------------------------------------


def noisy(factor: float) -> tuple[Program, Program]:
    """w + noise, and the same with a draw of another name and w times the factor."""
    program = of(lambda w: w + torch.rand_like(w), torch.ones(100))
    new = program.copy()
    (weight,), (draw, total) = new.placeholders, new.calls
    with new.graph.inserting_before(total):
        noise = new.graph.create_node(
            "call_function", aten.rand_like.default, (weight,), {"dtype": torch.float32}, "noise"
        )
        scaled = new.graph.create_node("call_function", aten.mul.Tensor, (weight, factor), {}, "scaled")
        result = new.graph.create_node("call_function", aten.add.Tensor, (scaled, noise), {}, "result")
    total.replace_all_uses_with(result)
    new.graph.erase_node(total)
    new.graph.erase_node(draw)
    return program, new.finish()


def test_what_was_drawn_is_drawn_again_and_is_replayed_in_the_reference() -> None:
    found = prove(*noisy(1.0), 0.0, True)
    assert (found.proved, found.max_abs_error) == (1, 0.0)
    # Noise of its own would put the reference 0.5 away from both, and hide what is wrong.
    with pytest.raises(EvidenceError, match=r"float64 error 0\.1 after"):
        prove(*noisy(1.1), 4.0, True)


@pytest.mark.parametrize("tolerance", [0.0, 1.5])
def test_kernels_that_do_not_repeat_themselves_are_judged_by_their_spread(tolerance: float) -> None:
    calls = iter(range(10**6))

    @torch.library.custom_op(f"memopt_tests::unsteady_{int(tolerance)}", mutates_args=())
    def unsteady(x: torch.Tensor) -> torch.Tensor:
        # as atomics do: each run has another error, of up to 3e-3, in float64 none
        return x.clone() if x.dtype is torch.float64 else x * (1 + 1e-3 * (next(calls) % 4))

    unsteady.register_fake(torch.empty_like)
    before = of(lambda w: unsteady(w), torch.ones(10))
    same = of(lambda w: unsteady(w * 1.0), torch.ones(10))
    found = prove(before, same, tolerance, True)
    assert found.proved == 1 and found.max_abs_error > 0
    with pytest.raises(EvidenceError, match="more than 2 times"):
        prove(before, of(lambda w: unsteady(w * 1.01), torch.ones(10)), tolerance, True)


def test_the_users_random_numbers_are_left_alone() -> None:
    torch.manual_seed(7)
    state = torch.get_rng_state()
    prove(*noisy(1.0), 0.0, "full")
    prove(user(lambda x: x * 2, torch.ones(3)), user(lambda x: x + x, torch.ones(3)), 0.0, True)
    assert torch.equal(torch.get_rng_state(), state)


def test_items_of_a_changed_result_are_proved():
    program = trace(lambda x: (aten.native_layer_norm(x, [6], None, None, 1e-5)[0].relu(),), torch.randn(4, 6))
    new = program.copy()
    (norm,) = [node for node in new.calls if node.target is aten.native_layer_norm.default]
    norm.args = (*norm.args[:-1], 1.0)
    with pytest.raises(EvidenceError):
        prove(program, new.finish(), 4.0, True)


def test_a_result_that_is_copied_is_compared_without_what_made_it():
    program = trace(lambda x: (x.tanh().sin(),), torch.randn(4, 6))
    new = program.copy()
    output = new.graph.output_node()
    with new.graph.inserting_before(output):
        copy = new.graph.call_function(aten.clone.default, (output.args[0][0],))
    output.args = ((copy,),)
    new = new.finish()
    (region,) = differing_regions(program, new)
    assert region.before == () and [node.name for node in region.after] == [copy.name]
    assert prove(program, new, 0.0, True).proved == 1
