"""EliminateCopies: which copies and views go, in which layouts, and why the others stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memopt.pass_manager import PassResult
from memopt.passes.eliminate_copies import EliminateCopies
from memopt.program import InputKind, Phase
from tests.passes.build import capture_joint, check, reasons, trace
from tests.support import capture, targets

aten = torch.ops.aten
X = torch.arange(12.0).reshape(3, 4) - 5
SPECIAL = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-42, 65504.0, 1 / 3])
CONTIGUOUS = torch.contiguous_format


def swept(function: Callable[..., Any], *tensors: torch.Tensor, **options: Any) -> PassResult:
    return check(EliminateCopies(), trace(function, *tensors, **options), *tensors)


def names(result: PassResult) -> list[str]:
    return [target.removeprefix("aten.").split(".")[0] for target in targets(result.program)]


# -- copies ---------------------------------------------------------------------------------------------------------


def test_a_clone_goes() -> None:
    result = swept(lambda x: (x.sin().clone().cos(),), X)
    assert names(result) == ["sin", "cos"]
    (change,) = result.changes
    assert (change.summary, change.before, change.after) == ("clone copies sin", ("clone",), ("sin",))
    assert result.refusals == ()


def test_a_chain_of_clones_goes() -> None:
    result = swept(lambda x: (x.sin().clone().clone().clone().cos(),), X)
    assert names(result) == ["sin", "cos"]
    assert [change.after for change in result.changes] == [("sin",)] * 3


def test_a_number_that_becomes_a_tensor_under_vmap_is_no_copy() -> None:
    doubled = torch.vmap(lambda row: row * 2)
    result = check(EliminateCopies(), capture_joint(lambda x: doubled(x).sin(), X.clone().requires_grad_()), X)
    assert result.program is not None


def test_a_clone_of_an_input_goes_when_it_stays_inside() -> None:
    assert names(swept(lambda x: (x.clone().cos(),), X)) == ["cos"]


def test_dropout_in_eval_mode_goes() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.ReLU(), nn.Dropout(0.1)).eval()
    program = capture(model, X)
    result = check(EliminateCopies(), program, *program.state.values(), X)
    assert names(result) == ["t", "addmm", "relu"]


def test_dropout_in_training_mode_stays() -> None:
    result = swept(lambda x: (aten.native_dropout(x, 0.5, True)[0] + 1,), X)
    assert result.changes == ()


def test_a_program_without_copies_is_returned_as_it_is() -> None:
    program = trace(lambda x: (x.sin().t() @ x,), X)
    assert EliminateCopies().run(program).program is program


@pytest.mark.parametrize(
    "copy",
    [
        lambda x: aten.clone(x),
        lambda x: aten.clone(x, memory_format=CONTIGUOUS),
        lambda x: aten._to_copy(x),
        lambda x: aten._to_copy(x, dtype=torch.float32),
        lambda x: aten._to_copy(x, device="cpu"),
        lambda x: aten.lift_fresh_copy(x),
        lambda x: aten.copy(torch.zeros(3, 4), x),
        lambda x: aten.cat([x], 1),
        lambda x: x * 1,
        lambda x: x * 1.0,
        lambda x: x / 1,
        lambda x: aten.mul.Scalar(x, 1),
        lambda x: aten.div.Scalar(x, 1.0),
    ],
)
def test_all_that_copies_goes(copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert names(swept(lambda x: (copy(x.sin()).cos(),), X)) == ["sin", "cos"]


@pytest.mark.parametrize(
    "computation",
    [
        lambda x: x * 2,
        lambda x: x / 2,
        lambda x: x * -1,
        lambda x: aten._to_copy(x, dtype=torch.float64),
        lambda x: aten.copy(torch.zeros(2, 3, 4), x),
        lambda x: aten.cat([x, x]),
        lambda x: x * torch.ones(3, 4),
        lambda x: aten.div.Tensor_mode(x, 1, rounding_mode="floor"),
    ],
)
def test_what_computes_stays(computation: Callable[[torch.Tensor], torch.Tensor]) -> None:
    program = trace(lambda x: (computation(x.sin()),), X)
    assert EliminateCopies().run(program).program is program


def test_units_keep_every_bit() -> None:
    for kind in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert names(swept(lambda x: ((x.abs() * 1).neg() / 1 + 0.5,), SPECIAL.to(kind))) == ["abs", "neg", "add"]


def test_complex_numbers_are_not_multiplied_by_one_for_free() -> None:
    x = torch.complex(SPECIAL, SPECIAL.flip(0))
    result = swept(lambda x: (x.clone() * 1,), x)
    assert names(result) == ["mul"]


def test_adding_zero_is_free_for_integers_only() -> None:
    result = swept(lambda x, i: (x.neg() + 0, (i.neg() + 0).abs(), (i.neg() - 0).abs()), SPECIAL, X.int())
    assert names(result) == ["neg", "add", "neg", "abs", "neg", "abs"]
    assert reasons(result) == {"add": "adding 0 turns -0.0 into 0.0"}


def test_multiplying_integers_by_a_float_is_a_cast() -> None:
    result = swept(lambda i: (i * 1.0, (i.neg() * 1).abs(), i / 1), X.int())
    assert names(result) == ["mul", "neg", "abs", "div"]


# -- casts ----------------------------------------------------------------------------------------------------------

EXACT = [
    (torch.float16, torch.float32), (torch.float16, torch.float64), (torch.bfloat16, torch.float32),
    (torch.float32, torch.float64), (torch.bool, torch.int8), (torch.bool, torch.float16),
    (torch.uint8, torch.int16), (torch.uint8, torch.bfloat16), (torch.int8, torch.float16),
    (torch.int16, torch.float32), (torch.int32, torch.float64), (torch.int32, torch.int64),
]  # fmt: skip
INEXACT = [
    (torch.float32, torch.float16), (torch.float32, torch.bfloat16), (torch.float16, torch.bfloat16),
    (torch.bfloat16, torch.float16), (torch.float64, torch.float32), (torch.int32, torch.float32),
    (torch.int64, torch.float64), (torch.int16, torch.bfloat16), (torch.uint8, torch.int8), (torch.int8, torch.uint8),
    (torch.float32, torch.int32), (torch.int64, torch.int32), (torch.int8, torch.bool),
]  # fmt: skip


def every_value(kind: torch.dtype) -> torch.Tensor:
    """All values of a dtype of at most 16 bits, and the extremes of larger ones."""
    if kind is torch.bool:
        return torch.tensor([False, True])
    if kind.itemsize == 1:
        return torch.arange(256).to(torch.uint8).view(kind)
    if kind.itemsize == 2:
        return torch.arange(-(2**15), 2**15).to(torch.int16).view(kind)
    if kind.is_floating_point:
        return torch.cat([SPECIAL, torch.tensor([3e38, 1e-45, 0.1])]).to(kind)
    return torch.tensor([torch.iinfo(kind).min, torch.iinfo(kind).max, 0, -1, 2**24 + 1], dtype=kind)


@pytest.mark.parametrize("narrow, wide", EXACT)
def test_widening_and_back_goes(narrow: torch.dtype, wide: torch.dtype) -> None:
    x = every_value(narrow)
    result = swept(lambda x: (x.view(1, -1).to(wide).to(narrow).flip(1),), x)
    assert names(result) == ["view", "flip"]
    assert {name for change in result.changes for name in change.before} == {"_to_copy", "_to_copy_1"}


@pytest.mark.parametrize("kind, other", INEXACT)
def test_narrowing_and_back_stays(kind: torch.dtype, other: torch.dtype) -> None:
    program = trace(lambda x: (x.flip(0).to(other).to(kind),), torch.ones(8).to(kind))
    assert EliminateCopies().run(program).program is program


def test_a_widened_value_that_is_read_elsewhere_stays() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = x.float()
        return wide.half().sin(), wide.cos()

    result = swept(function, X.half())
    assert names(result) == ["_to_copy", "sin", "cos"]


# -- layouts --------------------------------------------------------------------------------------------------------


def test_a_copy_into_other_strides_stays() -> None:
    result = swept(lambda x: (x.sin().t().clone(memory_format=CONTIGUOUS).view(12) @ x.view(12),), X)
    assert "clone" in names(result)
    assert reasons(result) == {
        "clone": "it copies strides [1, 4], offset 0 into strides [3, 1], which its readers or the caller see"
    }


def test_a_copy_of_the_same_strides_goes_whatever_they_are() -> None:
    assert names(swept(lambda x: (x.sin().t().clone().sum(0),), X)) == ["sin", "t", "sum"]


def test_a_copy_out_of_the_middle_of_a_storage_stays() -> None:
    result = swept(lambda x: ((x.sin()[1:].clone() * x[:2]).sum(),), X)
    assert "offset 4 into strides [4, 1]" in reasons(result)["clone"]


def test_a_copy_that_only_copies_read_goes_whatever_its_strides() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor]:
        y = x.sin().permute(0, 2, 1).clone(memory_format=CONTIGUOUS)
        return (y.permute(2, 0, 1).clone(memory_format=CONTIGUOUS) + 1,)

    result = swept(function, torch.randn(2, 3, 4))
    assert names(result) == ["sin", "permute", "clone", "add"]


def test_a_round_trip_through_another_layout_goes() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor]:
        y = x.sin().permute(0, 2, 1).clone(memory_format=CONTIGUOUS)
        return (y.permute(0, 2, 1).clone(memory_format=CONTIGUOUS) + 1,)

    assert names(swept(function, torch.randn(2, 3, 4))) == ["sin", "add"]


def test_a_copy_whose_strides_a_format_preserving_copy_keeps_stays() -> None:
    result = swept(lambda x: (x.sin().t().clone(memory_format=CONTIGUOUS).t().clone() + 1,), X)
    assert names(result).count("clone") == 1


def test_a_channels_last_copy_before_a_convolution_stays() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.conv2d(x.sin().clone(memory_format=torch.channels_last), w),)

    result = swept(function, torch.randn(1, 3, 8, 8), torch.randn(2, 3, 3, 3))
    assert names(result) == ["sin", "clone", "convolution"]


# -- aliasing -------------------------------------------------------------------------------------------------------


def test_an_output_does_not_become_an_input() -> None:
    result = swept(lambda x: (x.clone(), x.t().clone()), X)
    assert names(result) == ["clone", "t", "clone"]
    assert reasons(result) == {
        "clone": "it reaches the caller, and would share memory with the input behind x_1",
        "clone_1": "it reaches the caller, and would share memory with the input behind t",
    }


def test_an_output_does_not_become_a_view_of_an_input() -> None:
    result = swept(lambda x: (x.clone().view(12),), X)
    assert names(result) == ["clone", "view"]


def test_an_output_does_not_become_a_constant() -> None:
    result = swept(lambda x, c: (x + 1, c.clone()), X, X + 2, kinds={1: InputKind.CONSTANT})
    assert set(reasons(result)) == {"clone"}


def test_buffers_that_are_swapped_stay_apart() -> None:
    kinds = {0: InputKind.BUFFER, 1: InputKind.BUFFER}
    result = swept(lambda a, b: (b.clone(), a.clone(), a + b), X, X + 1, kinds=kinds, mutated={0: 0, 1: 1})
    assert names(result) == ["clone", "clone", "add"]


def test_two_outputs_do_not_become_one() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.sin()
        return y, y.clone()

    assert reasons(swept(function, X)) == {"clone": "two outputs would share memory"}


def test_two_copies_that_are_outputs_become_one_at_most() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.sin()
        return y.clone(), y.clone().view(12)

    result = swept(function, X)
    assert names(result) == ["sin", "clone", "view"]
    assert reasons(result) == {"clone_1": "two outputs would share memory"}


def test_an_output_that_is_a_copy_of_an_inner_value_becomes_that_value() -> None:
    assert names(swept(lambda x: (x.sin().clone(),), X)) == ["sin"]


def test_a_copy_that_a_higher_order_operator_reads_stays() -> None:
    class Model(nn.Module):
        def forward(self, flag: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(flag, lambda v: v.sin(), lambda v: v.cos(), (x.clone(),))

    program = capture(Model(), torch.tensor(True), X)
    result = check(EliminateCopies(), program, torch.tensor(True), X)
    assert reasons(result) == {"clone": "a higher-order operator reads it"}


def test_as_strided_of_a_copy_reads_the_same_elements() -> None:
    assert names(swept(lambda x: (aten.as_strided(x.sin().clone(), [2, 2], [1, 3], 1) + 1,), X)) == [
        "sin", "as_strided", "add"
    ]  # fmt: skip
    result = swept(lambda x: (aten.as_strided(x.sin()[1:].clone(), [2, 2], [1, 3], 1) + 1,), X)
    assert "clone" in names(result)


def test_in_place_annotations_are_forgotten() -> None:
    program = trace(lambda x: (x.sin().clone().cos().exp(),), X).copy()
    program.calls[-1].meta["inplace"] = 0
    result = check(EliminateCopies(), program.finish(), X)
    assert not any("inplace" in node.meta for node in result.program.graph.nodes)


# -- memory ---------------------------------------------------------------------------------------------------------


def test_a_copy_that_lets_a_larger_storage_go_stays() -> None:
    result = swept(lambda x: (x.sin()[:1].clone().cos() + x,), X)
    assert reasons(result) == {"clone": "48 bytes would stay alive in place of the copy's 16"}


def test_a_copy_of_a_part_of_what_lives_anyway_goes() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor]:
        y = x.sin()
        return (y[:1].clone().cos() + y,)

    assert names(swept(function, X)) == ["sin", "slice", "cos", "add"]


def test_a_copy_of_a_part_of_an_input_goes() -> None:
    assert names(swept(lambda x: (x[:1].clone().cos(),), X)) == ["slice", "cos"]


# -- training -------------------------------------------------------------------------------------------------------

W = torch.randn(4, 4)


def joint(function: Callable[..., Any]) -> PassResult:
    weight = W.clone().requires_grad_()
    return check(EliminateCopies(), capture_joint(function, weight, X), weight, X)


def test_training_copies_and_detaches_go() -> None:
    result = joint(lambda w, x: ((x @ w).clone().sin().exp().clone().relu() * 1).sum())
    assert not {"clone", "detach", "alias"} & set(names(result))
    assert all(node.meta["phase"] in (Phase.FORWARD, Phase.BACKWARD) for node in result.program.calls)


def test_an_output_does_not_become_a_tensor_that_backward_reads() -> None:
    result = joint(lambda w, x: (x @ w).sin().exp().clone())
    assert reasons(result) == {
        "clone": "it reaches the caller, and would share memory with a tensor that backward reads"
    }


def test_a_tensor_that_backward_reads_does_not_become_an_output() -> None:
    result = joint(lambda w, x: ((x @ w) * 2, ((x @ w) * 2).clone().exp().sum()))
    assert not any("share memory" in reason for reason in reasons(result).values())

    def function(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = (x @ w) * 2
        return y, y.clone().sin().sum()

    assert reasons(joint(function))["clone"] == "backward reads it, and it would share memory with an output"


def test_a_tensor_that_backward_reads_does_not_become_an_input() -> None:
    result = joint(lambda w, x: (x.clone() @ w).sum())
    assert reasons(result)["clone"] == ("backward reads it, and it would share memory with the input behind primals_2")


def test_random_numbers_are_drawn_as_before() -> None:
    def function(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (nn.functional.dropout((x @ w).clone(), 0.5) * torch.rand(4)).clone().sum()

    assert "clone" not in names(joint(function))


# -- size -----------------------------------------------------------------------------------------------------------


def test_a_large_graph_takes_linear_time() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor]:
        for _ in range(300):
            x = x.t().t().sin().clone()
        return (x,)

    result = EliminateCopies().run(trace(function, X))
    assert names(result) == ["sin"] * 300
