"""MergeCommon: what is the same, when one value may stand for two, and why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memopt.graph.rewrite import ALLOWANCE
from memopt.pass_manager import PassResult
from memopt.passes.merge_common import MergeCommon
from memopt.program import InputKind, Phase, Program
from tests.passes.build import capture_joint, check, reasons, trace
from tests.support import capture, targets

aten = torch.ops.aten
X = torch.arange(12.0).reshape(3, 4)
BIG = torch.randn(129, 128)  # just above the allowance of 64 KiB
assert 65536 < BIG.nbytes < 2 * 65536 and ALLOWANCE == 65536


def merged(function: Callable[..., Any], *tensors: torch.Tensor, **options: Any) -> PassResult:
    return check(MergeCommon(), trace(function, *tensors, **options), *tensors)


def count(program: Program, name: str) -> int:
    return sum(name == target for target in targets(program))


# -- what is the same -----------------------------------------------------------------------------------------------


def test_two_equal_nodes_become_the_first() -> None:
    result = merged(lambda x: (x.sin() + x.sin().cos(),), X)
    assert [node.name for node in result.program.calls] == ["sin", "cos", "add"]
    (change,) = result.changes
    assert (change.summary, change.before, change.after) == ("sin_1 is sin", ("sin_1",), ("sin",))
    assert result.refusals == ()


def test_many_equal_nodes_become_the_first() -> None:
    result = merged(lambda x: (x.sin() + x.sin() + x.sin() + x.sin(),), X)
    assert [node.name for node in result.program.calls] == ["sin", "add", "add_1", "add_2"]
    assert [(change.before, change.after) for change in result.changes] == [
        (("sin_1",), ("sin",)),
        (("sin_2",), ("sin",)),
        (("sin_3",), ("sin",)),
    ]


def test_chains_merge_as_one() -> None:
    result = merged(lambda x: (x.sin().exp().cos() - x.sin().exp().cos() * 2,), X)
    assert [node.name for node in result.program.calls] == ["sin", "exp", "cos", "mul", "sub"]
    assert [change.before for change in result.changes] == [("sin_1",), ("exp_1",), ("cos_1",)]


def test_nothing_in_common_returns_the_program_as_it_is() -> None:
    program = trace(lambda x: (x.sin() + x.cos(),), X)
    assert MergeCommon().run(program).program is program


def test_items_of_equal_operations_merge() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor]:
        a = aten.native_layer_norm(x, [4], None, None, 1e-5)
        b = aten.native_layer_norm(x, [4], None, None, 1e-5)
        return (a[0] + b[0] * b[1],)

    result = merged(function, X)
    assert count(result.program, "aten.native_layer_norm.default") == 1
    assert [change.before for change in result.changes] == [("native_layer_norm_1",), ("getitem_3",), ("getitem_4",)]


def test_creations_merge() -> None:
    result = merged(lambda x: (x + torch.arange(4) + torch.arange(4),), X)
    assert count(result.program, "aten.arange.default") == 1


@pytest.mark.parametrize(
    "one, other",
    [(1, 1.0), (1.0, True), (1, True), (0.0, -0.0), (1.0, 2.0)],
)
def test_literals_of_other_types_and_signs_are_not_the_same(one: Any, other: Any) -> None:
    result = merged(lambda x: (aten.mul.Tensor(x, one) / aten.mul.Tensor(x, other),), X.clone())
    assert count(result.program, "aten.mul.Tensor") == 2
    assert result.changes == ()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0, 3, True])
def test_equal_literals_are_the_same(value: Any) -> None:
    result = merged(lambda x: (aten.mul.Tensor(x, value) + aten.mul.Tensor(x, value),), X)
    assert count(result.program, "aten.mul.Tensor") == 1


def test_complex_literals() -> None:
    result = merged(lambda x: (aten.mul.Tensor(x, 1j) + aten.mul.Tensor(x, 1j) + aten.mul.Tensor(x, 2j),), X)
    assert count(result.program, "aten.mul.Tensor") == 2


def test_keyword_arguments_count() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor]:
        kinds = [torch.float64, torch.float64, torch.float16]
        a, b, c = (aten._to_copy.default(x, dtype=kind) for kind in kinds)
        return (a + b + c,)

    assert count(merged(function, X).program, "aten._to_copy.default") == 2


def test_lists_of_nodes_count() -> None:
    result = merged(lambda x, y: (torch.cat([x, y]) + torch.cat([x, y]) * torch.cat([y, x]),), X, X + 1)
    assert count(result.program, "aten.cat.default") == 2


def test_operands_in_another_order_are_not_the_same() -> None:
    result = merged(lambda x, y: ((x + y) * (y + x),), X, X + 1)
    assert result.changes == ()


def test_inputs_are_never_merged() -> None:
    kinds = {0: InputKind.PARAMETER, 1: InputKind.PARAMETER}
    result = merged(lambda x, y: (x.sin() + y.sin(),), X, X.clone(), kinds=kinds)
    assert result.changes == ()


# -- random numbers and effects -------------------------------------------------------------------------------------


def test_draws_are_never_merged() -> None:
    result = merged(lambda x: (torch.rand_like(x) + torch.rand_like(x),), X)
    assert count(result.program, "aten.rand_like.default") == 2
    assert reasons(result) == {"rand_like_1": "equals rand_like, but each draws random numbers of its own"}


def test_what_reads_different_draws_is_not_the_same() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor]:
        a, b = (aten.native_dropout(x.sin(), 0.5, True) for _ in range(2))
        return (a[0].cos() + b[0].cos(),)

    result = merged(function, X)
    assert count(result.program, "aten.cos.default") == 2
    assert count(result.program, "aten.sin.default") == 1
    assert set(reasons(result)) == {"native_dropout_1"}


def test_dead_draws_stay() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b, c = (torch.rand_like(x) for _ in range(3))
        return c, a, b

    result = merged(function, X, keep=1)
    assert count(result.program, "aten.rand_like.default") == 3


def test_assertions_stay() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to(torch.float32).sin() + x.to(torch.float32).sin()

    program = capture(Model(), X)
    result = check(MergeCommon(), program, X)
    name = "aten._assert_tensor_metadata.default"
    assert count(result.program, name) == count(program, name) == 2
    assert count(result.program, "aten.sin.default") == 1


def test_higher_order_operators_stay() -> None:
    class Model(nn.Module):
        def forward(self, flag: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            a, b = (torch.cond(flag, lambda v: v.sin(), lambda v: v.cos(), (x,)) for _ in range(2))
            return a + b

    result = check(MergeCommon(), capture(Model(), torch.tensor(True), X), torch.tensor(True), X)
    assert " ".join(targets(result.program)).count("cond") == 2


# -- outputs --------------------------------------------------------------------------------------------------------


def test_two_outputs_stay_two_tensors() -> None:
    result = merged(lambda x: (x.sin(), x.sin()), X)
    assert reasons(result) == {"sin_1": "equals sin, but both are outputs, which must stay two tensors"}


def test_two_outputs_through_views_stay_two_tensors() -> None:
    result = merged(lambda x: (x.sin().t(), x.sin().view(12)), X)
    assert count(result.program, "aten.sin.default") == 2
    assert reasons(result) == {"sin_1": "equals sin, but both reach the caller, who may write to one of them"}


def test_what_stands_for_a_value_whose_view_is_returned_is_no_other_output() -> None:
    """Of three equal values the second took the place of the third, and then the first of both."""
    result = merged(lambda x: (x.sin(), x.sin().relu(), x.sin().t()), X)
    assert count(result.program, "aten.sin.default") == 2
    assert reasons(result) == {"sin_1": "equals sin, but both reach the caller, who may write to one of them"}


def test_two_equal_views_of_an_input_stay_two_outputs() -> None:
    result = merged(lambda x: (x.t(), x.t()), X)
    assert set(reasons(result)) == {"t_1"}


def test_one_output_and_one_inner_value_merge() -> None:
    result = merged(lambda x: (x.sin(), x.sin().cos()), X)
    assert count(result.program, "aten.sin.default") == 1
    result = merged(lambda x: (x.sin().cos(), x.sin()), X)
    assert count(result.program, "aten.sin.default") == 1


def test_of_three_twins_two_may_be_outputs() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b, c = x.sin(), x.sin(), x.sin()
        return a, c, b.cos()

    result = merged(function, X)
    assert count(result.program, "aten.sin.default") == 2


def test_values_of_mutated_inputs_are_outputs_too() -> None:
    kinds = {0: InputKind.BUFFER}
    result = merged(lambda b, x: (b * 2, (b * 2) + x, b * 2), X, X, kinds=kinds, mutated={0: 0})
    assert count(result.program, "aten.mul.Tensor") == 2


# -- memory ---------------------------------------------------------------------------------------------------------


def test_a_large_value_still_to_be_read_merges() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor]:
        a, b = x.sin(), x.sin()
        return (a.exp() + b.cos() + a,)

    assert count(merged(function, BIG).program, "aten.sin.default") == 1


def test_a_large_value_is_made_again_rather_than_held() -> None:
    result = merged(lambda x: (x.sin().sum() + x.exp().sum() + x.sin().cos().sum(),), BIG)
    assert count(result.program, "aten.sin.default") == 2
    assert reasons(result) == {
        "sin_1": "equals sin, but 66048 bytes would be held from its last use to here, where they can be recomputed"
    }


def test_a_large_creation_is_made_again_rather_than_held() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor]:
        return ((x + torch.ones(129, 128)).sum() + (x.cos() * torch.ones(129, 128)).sum(),)

    result = merged(function, BIG)
    assert count(result.program, "aten.ones.default") == 2
    assert set(reasons(result)) == {"ones_1"}


def test_large_intermediates_of_a_chain_need_not_be_held() -> None:
    result = merged(lambda x: (x.sin().exp().sum() + x.cos().sum() + x.sin().exp().sum(),), BIG)
    assert targets(result.program).count("aten.sin.default") == 1
    assert targets(result.program).count("aten.exp.default") == 1
    assert targets(result.program).count("aten.sum.default") == 2
    assert result.refusals == ()


def test_a_chain_merges_no_further_than_memory_allows() -> None:
    result = merged(lambda x: (x.sin().exp().sum() + x.sin().exp().cos().sum(),), BIG)
    assert targets(result.program).count("aten.sin.default") == 2
    assert targets(result.program).count("aten.exp.default") == 2
    assert set(reasons(result)) == {"exp_1", "sin_1"}


def test_the_allowance_is_for_all_merges_together() -> None:
    x = torch.randn(100, 128)  # 50 KiB each: one fits
    result = merged(lambda x: (x.sin().sum() + x.cos().sum() + x.sin().exp().sum() + x.cos().exp().sum(),), x)
    assert count(result.program, "aten.sin.default") + count(result.program, "aten.cos.default") == 3
    assert len(result.refusals) == 1


def test_views_of_one_storage_cost_nothing() -> None:
    kinds = {0: InputKind.PARAMETER}
    result = merged(lambda w, x: ((x @ w.t()).sum() + x.sum() + (x.cos() @ w.t()).sum(),), BIG, BIG, kinds=kinds)
    assert count(result.program, "aten.t.default") == 1


def test_views_of_large_equal_values_follow_them() -> None:
    result = merged(lambda x: (x.sin().t().sum() + x.sum() + x.sin().t().cos().sum(),), BIG)
    assert count(result.program, "aten.sin.default") == 2
    assert count(result.program, "aten.t.default") == 2


def test_in_place_annotations_are_forgotten() -> None:
    program = trace(lambda x: (x.sin().exp() + x.sin().cos(),), X).copy()
    exp = next(node for node in program.calls if node.name == "exp")
    exp.meta["inplace"] = 0
    result = check(MergeCommon(), program.finish(), X)
    assert len(result.changes) == 1
    assert not any("inplace" in node.meta for node in result.program.graph.nodes)


# -- training -------------------------------------------------------------------------------------------------------


def test_forward_twins_merge_with_all_that_backward_reads() -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    program = capture_joint(lambda w, x: ((x @ w).sin() * (x @ w).sin()).sum(), weight, X)
    result = check(MergeCommon(), program, weight, X)
    forward = [node for node in result.program.calls if node.meta["phase"] is Phase.FORWARD]
    assert [str(node.target) for node in forward].count("aten.mm.default") == 1
    assert [str(node.target) for node in forward].count("aten.sin.default") == 1


def test_dropout_masks_of_a_training_program_stay_two() -> None:
    weight = torch.randn(4, 4, requires_grad=True)

    def function(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        h = x @ w
        return nn.functional.dropout(h, 0.5) + nn.functional.dropout(h, 0.5)

    result = check(MergeCommon(), capture_joint(function, weight, X), weight, X)
    assert count(result.program, "aten.native_dropout.default") == 2


def test_backward_does_not_make_forward_save_one_more_tensor() -> None:
    weight = torch.randn(4, 4, requires_grad=True)

    def function(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (x @ w).sin().sum()

    program = capture_joint(function, weight, X).copy()
    mm = next(node for node in program.calls if node.target is aten.mm.default)
    cos = next(node for node in program.calls if node.target is aten.cos.default)
    with program.graph.inserting_before(cos):
        again = program.graph.call_function(aten.sin.default, (mm,))
        again.meta["phase"] = Phase.BACKWARD
    cos.args = (again,)
    program = program.finish()
    result = check(MergeCommon(), program, weight, X)
    assert reasons(result) == {
        again.name: "equals sin, but it belongs to forward: one more tensor would have to be saved for backward"
    }


def test_backward_merges_with_a_forward_value_that_it_reads_anyway() -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    program = capture_joint(lambda w, x: (x @ w).sin().exp().sum(), weight, X).copy()
    nodes = {str(node.target): node for node in program.calls}
    cos, mm = nodes["aten.cos.default"], next(node for node in program.calls if node.target is aten.mm.default)
    sin = nodes["aten.sin.default"]
    with program.graph.inserting_before(cos):
        again = program.graph.call_function(aten.sin.default, (mm,))
        again.meta["phase"] = Phase.BACKWARD
    cos.args = (again,)
    with program.graph.inserting_after(cos):
        late = program.graph.call_function(aten.mul.Tensor, (cos, sin))
        late.meta["phase"] = Phase.BACKWARD
    cos.replace_all_uses_with(late, delete_user_cb=lambda user: user is not late)
    program = program.finish()
    result = check(MergeCommon(), program, weight, X)
    assert [change.before for change in result.changes] == [(again.name,)]


def test_views_merge_across_the_boundary() -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    program = capture_joint(lambda w, x: (x.t().sin() @ w[:3]).sum() + (x @ w).sum(), weight, X)
    result = check(MergeCommon(), program, weight, X)
    views = [
        node for node in result.program.calls if node.target is aten.t.default and node.args[0].name == "primals_2"
    ]
    assert len(views) == 1


def test_an_output_does_not_become_a_tensor_that_backward_reads() -> None:
    weight = torch.randn(4, 4, requires_grad=True)

    def function(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = x @ w
        return h.sin().exp().sum(), h.detach().sin()

    program = capture_joint(function, weight, X).copy()
    sin, other = [node for node in program.calls if node.target is aten.sin.default]
    other.args = sin.args
    cos = next(node for node in program.calls if node.target is aten.cos.default)
    cos.args = (sin,)
    program = program.finish()
    result = check(MergeCommon(), program, weight, X)
    assert reasons(result) == {
        other.name: f"equals {sin.name}, but one reaches the caller, who may write to it, and backward reads the other"
    }


# -- size -----------------------------------------------------------------------------------------------------------


def test_a_large_graph_takes_linear_time() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor]:
        for _ in range(300):
            x = x.sin() + x.sin() + torch.ones(4)
        return (x,)

    result = MergeCommon().run(trace(function, X))
    assert count(result.program, "aten.ones.default") == 1
    assert len(result.changes) == 599
