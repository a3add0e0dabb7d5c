"""FoldConstants: what counts as constant, what is worth folding, what it costs, and why not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from memopt.graph.rewrite import ALLOWANCE
from memopt.pass_manager import PassResult
from memopt.passes import fold_constants
from memopt.passes.fold_constants import FoldConstants
from memopt.program import InputKind, Program
from tests.passes.build import capture_joint, check, reasons, trace
from tests.support import assert_same, capture, run, targets

aten = torch.ops.aten
X = torch.arange(12.0).reshape(3, 4)
C = torch.linspace(0.1, 2.0, 4)
BIG = torch.randn(129, 128)
assert 65536 < BIG.nbytes < 2 * 65536 and ALLOWANCE == 65536
CONSTANT, PARAMETER, BUFFER = InputKind.CONSTANT, InputKind.PARAMETER, InputKind.BUFFER


def folded(function: Callable[..., Any], *tensors: torch.Tensor, **options: Any) -> PassResult:
    return check(FoldConstants(), trace(function, *tensors, **options), *tensors)


# -- what is constant -----------------------------------------------------------------------------------------------


def test_constants_fold_and_go() -> None:
    result = folded(lambda x, c: (x * (c.sin() + 1),), X, C, kinds={1: CONSTANT})
    assert targets(result.program) == ["aten.mul.Tensor"]
    assert [entry.name for entry in result.program.inputs] == ["x_1", "folded_add"]
    (change,) = result.changes
    assert change.before == ("sin", "add")
    assert change.after == ("folded_add",)
    assert change.summary == "folded 2 nodes into 1 constants of 16 bytes"
    assert_same(result.program.state["folded_add"], C.sin() + 1)
    assert result.program.baked == frozenset()


def test_constants_that_are_read_elsewhere_stay() -> None:
    result = folded(lambda x, c: (x * c.sin() + c,), X, C, kinds={1: CONSTANT})
    assert [entry.name for entry in result.program.inputs] == ["x_1", "c_1", "folded_sin"]


def test_parameters_and_buffers_fold_and_are_named_as_baked() -> None:
    kinds = {1: PARAMETER, 2: BUFFER, 3: PARAMETER}
    result = folded(lambda x, p, b, q: (x * (p + b) + q,), X, C, C + 1, C + 2, kinds=kinds)
    assert targets(result.program) == ["aten.mul.Tensor", "aten.add.Tensor"]
    assert result.program.baked == {"p_1", "b_1"}
    assert [entry.kind for entry in result.program.inputs][1:] == [PARAMETER, BUFFER, PARAMETER, CONSTANT]


def test_earlier_baked_inputs_stay_named() -> None:
    program = trace(lambda x, p, q: (x * p.exp() + q,), X, C, C + 1, kinds={1: PARAMETER, 2: PARAMETER})
    result = FoldConstants().run(dataclasses.replace(program, baked=frozenset({"q_1"})))
    assert result.program.baked == {"p_1", "q_1"}


def test_user_inputs_are_no_constants() -> None:
    program = trace(lambda x, y: (x + y.sin(),), X, C)
    assert FoldConstants().run(program).program is program


def test_creations_fold() -> None:
    result = folded(lambda x: (x + torch.arange(4) * 2.0 + torch.full((4,), 3.0) + aten.scalar_tensor(1.0),), X)
    assert targets(result.program) == ["aten.add.Tensor"] * 3
    assert len(result.program.state) == 3


def test_a_creation_that_reads_a_tensor_is_no_constant() -> None:
    result = folded(lambda x: (x + torch.ones_like(x),), X)
    assert result.changes == ()


def test_uninitialised_memory_is_no_constant() -> None:
    result = check(FoldConstants(), trace(lambda x: (x + aten.fill.Scalar(torch.empty(4), 0.0),), X), X)
    assert "aten.empty.memory_format" in targets(result.program)


def test_draws_are_no_constants() -> None:
    result = folded(lambda x, c: (x + torch.rand(4) + torch.rand_like(c), c.sin() * x), X, C, kinds={1: CONSTANT})
    assert targets(result.program).count("aten.rand.default") == 1
    assert targets(result.program).count("aten.rand_like.default") == 1
    assert [change.before for change in result.changes] == [("sin",)]


def test_items_of_a_constant_operation_fold() -> None:
    def function(x: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor]:
        out, mean, _ = aten.native_layer_norm(c, [4], None, None, 1e-5)
        return (x * out + mean,)

    result = folded(function, X, C, kinds={1: CONSTANT})
    assert targets(result.program) == ["aten.mul.Tensor", "aten.add.Tensor"]
    assert len(result.changes[0].after) == 2


def test_a_maximal_constant_part_folds_into_its_last_values() -> None:
    result = folded(lambda x, c: (x * c.sin().cos().exp() + (c + 1).relu(),), X, C, kinds={1: CONSTANT})
    assert result.changes[0].after == ("folded_exp", "folded_relu")
    assert set(result.changes[0].before) == {"sin", "cos", "exp", "add", "relu"}


def test_a_value_read_inside_and_outside_folds_too() -> None:
    def function(x: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor]:
        s = c.sin()
        return (x * s + s.cos(),)

    assert folded(function, X, C, kinds={1: CONSTANT}).changes[0].after == ("folded_sin", "folded_cos")


def test_a_real_model() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(4, 5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + torch.arange(5) / 5

    program = capture(Model().eval(), X)
    result = check(FoldConstants(), program, *program.state.values(), X)
    assert "aten.arange.start_step" not in targets(result.program)
    assert "aten._weight_norm_interface.default" not in targets(result.program)
    assert len(result.program.baked) == 2
    assert_same(run(result.program, X), run(program, X))


def test_unread_readers_of_constants_go_too() -> None:
    def function(x: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        s = c.sin()
        return x + s, x * s

    result = folded(function, X, C, kinds={1: CONSTANT}, keep=1)
    assert targets(result.program) == ["aten.add.Tensor"]
    assert set(result.changes[0].before) == {"sin", "mul"}


def test_what_only_dead_nodes_read_is_left_alone() -> None:
    program = trace(lambda x, c: (x.relu(), x * c.sin()), X, C, kinds={1: CONSTANT}, keep=1)
    assert FoldConstants().run(program).program is program


# -- bits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_folding_keeps_dtype_and_bits(dtype: torch.dtype) -> None:
    result = folded(lambda x, c: (x * (c / 3 * c),), X, C.to(dtype), kinds={1: CONSTANT})
    constant = result.program.state["folded_mul"]
    assert constant.dtype == dtype
    assert torch.equal(constant, C.to(dtype) / 3 * C.to(dtype))


def test_folding_keeps_strides() -> None:
    c = torch.randn(4, 3).t()
    result = folded(lambda x, c: (x + c.sin(),), X, c, kinds={1: CONSTANT})
    assert result.program.state["folded_sin"].stride() == (1, 3)


def test_folding_works_under_a_fake_mode_and_in_inference_mode() -> None:
    program = trace(lambda x, c: (x * c.sin(),), X, C, kinds={1: CONSTANT})
    with FakeTensorMode():
        state = FoldConstants().run(program).program.state
    assert_same(state["folded_sin"], C.sin())
    with torch.inference_mode():
        state = FoldConstants().run(program).program.state
    assert not state["folded_sin"].is_inference()


# -- views ----------------------------------------------------------------------------------------------------------


def test_views_of_parameters_are_not_folded() -> None:
    program = trace(lambda x, p: (x @ p.t().reshape(4, 4).t(),), X, torch.randn(4, 4), kinds={1: PARAMETER})
    result = FoldConstants().run(program)
    assert result.program is program
    assert result.refusals == ()


def test_views_at_the_end_stay() -> None:
    result = folded(lambda x, c: (x + c.sin().view(1, 4).expand(3, 4),), X, C, kinds={1: CONSTANT})
    assert targets(result.program) == ["aten.view.default", "aten.expand.default", "aten.add.Tensor"]
    assert result.program.state["folded_sin"].nbytes == 16


def test_views_in_between_fold() -> None:
    result = folded(lambda x, c: (x + c.view(1, 4).sin(),), X, C, kinds={1: CONSTANT})
    assert targets(result.program) == ["aten.add.Tensor"]


def test_split_pieces_of_a_folded_value_stay_views() -> None:
    def function(x: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor]:
        a, b = c.sin().split(2)
        return (x[:, :2] * a + b,)

    result = folded(function, X, C, kinds={1: CONSTANT})
    assert result.changes[0].after == ("folded_sin",)
    assert "aten.split.Tensor" in targets(result.program)


# -- memory ---------------------------------------------------------------------------------------------------------


def test_a_large_constant_folds_into_one_of_its_size() -> None:
    result = folded(lambda x, c: (x + c.sin(),), X[:1, :1], BIG, kinds={1: CONSTANT})
    assert targets(result.program) == ["aten.add.Tensor"]
    assert sum(value.nbytes for value in result.program.state.values()) == BIG.nbytes


def test_a_large_result_of_a_parameter_would_double_it() -> None:
    result = folded(lambda x, p: (x + p.sin(),), X[:1, :1], BIG, kinds={1: PARAMETER})
    assert result.changes == ()
    assert reasons(result) == {"sin": "its 66048 bytes would be held for good, 65536 bytes of the allowance are left"}


def test_a_large_creation_is_not_held() -> None:
    result = folded(lambda x: (x + torch.ones(129, 128),), X[:1, :1])
    assert set(reasons(result)) == {"ones"}


def test_a_small_result_of_large_parameters_folds() -> None:
    result = folded(lambda x, p: (x + p.sum(0)[:4],), X, BIG, kinds={1: PARAMETER})
    assert "aten.sum.dim_IntList" not in targets(result.program)
    assert result.program.baked == {"p_1"}


def test_results_that_free_a_constant_only_together_fold_together() -> None:
    result = folded(lambda x, c: (x + c.half().float().sum() + c.half(),), X[:1, :1], BIG, kinds={1: CONSTANT})
    assert len(result.changes) == 1 and len(result.changes[0].after) == 2
    assert sum(value.nbytes for value in result.program.state.values()) < BIG.nbytes


def test_a_group_that_does_not_fit_is_folded_in_part_smallest_first() -> None:
    def function(x: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor]:
        return (x + c.sin() + c.cos() + c.exp() + c.sum(),)

    result = folded(function, X[:1, :1], BIG, kinds={1: CONSTANT})
    assert [change.before for change in result.changes] == [("sum_1",)]
    assert set(reasons(result)) == {"sin", "cos", "exp"}


def test_the_allowance_is_for_all_groups_together() -> None:
    kinds = {1: PARAMETER, 2: PARAMETER}
    result = folded(lambda x, p, q: (x + p.sin() + q.cos(),), X[:1, :1], BIG[:80], BIG[:80].clone(), kinds=kinds)
    assert [change.before for change in result.changes] == [("sin",)]
    assert "24576 bytes of the allowance are left" in reasons(result)["cos"]


def test_a_constant_that_a_kept_view_reads_is_not_freed() -> None:
    result = folded(lambda x, c: (x + c.sin() + c.t().t(),), X[:1, :1], BIG, kinds={1: CONSTANT})
    assert result.changes == ()
    assert set(reasons(result)) == {"sin"}


def test_huge_intermediates_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold_constants, "WORKSPACE", 1000)
    result = folded(lambda x: (x + torch.ones(20, 20).sum(),), X)
    assert reasons(result) == {"sum_1": "computing it would take 1604 bytes"}


# -- refusals -------------------------------------------------------------------------------------------------------


def test_a_result_that_is_returned_is_refused() -> None:
    result = folded(lambda x, c: (x.sin(), c.sin()), X, C, kinds={1: CONSTANT})
    assert reasons(result) == {"sin_1": "it is returned to the caller, who may write to it"}


def test_a_result_whose_view_is_returned_is_refused() -> None:
    result = folded(lambda x, c: (x * c.sin(), c.cos().view(2, 2)), X, C, kinds={1: CONSTANT})
    assert set(reasons(result)) == {"cos"}
    assert [change.before for change in result.changes] == [("sin",)]


def test_a_buffer_that_is_updated_is_no_constant() -> None:
    result = folded(lambda b, x: (b + 1, x * b.sin()), C, X, kinds={0: BUFFER}, mutated={0: 0})
    assert result.changes == ()


def test_a_buffer_that_shares_storage_with_an_updated_one_is_no_constant() -> None:
    base = torch.linspace(0.1, 2.0, 8)
    program = trace(
        lambda a, b, x: (a + 1, x * b.sin()), base[:4], base[4:], X, kinds={0: BUFFER, 1: BUFFER}, mutated={0: 0}
    )
    assert FoldConstants().run(program).program is program


def test_unknown_values_are_refused() -> None:
    program = trace(lambda x, p: (x * p.sin(),), X, C, kinds={1: PARAMETER})
    fake = FakeTensorMode().from_tensor(C)
    for state in ({}, {"p_1": fake}, {"p_1": C.to("meta")}):
        result = FoldConstants().run(dataclasses.replace(program, state=state))
        assert result.program.graph is program.graph
        assert reasons(result) == {"sin": "the values of p_1 are not known"}


def test_values_that_do_not_look_as_recorded_are_refused() -> None:
    program = trace(lambda x, p: (x * p.sin(),), X, C, kinds={1: PARAMETER})
    result = FoldConstants().run(dataclasses.replace(program, state={"p_1": C.double()}))
    assert reasons(result) == {
        "sin": "p_1 is float64[4], strides [1], cpu here, and float32[4], strides [1], cpu in the program"
    }


def test_an_operation_that_fails_is_refused() -> None:
    result = FoldConstants().run(
        trace(
            lambda x, c, i: (x + aten.index_select(c, 0, i),),
            X[:1, :1],
            C,
            torch.tensor([7]),
            kinds={1: CONSTANT, 2: CONSTANT},
        )
    )
    assert reasons(result)["index_select"].startswith("index_select fails: index out of range")


def test_effects_are_no_constants() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("c", C.clone())
            self.register_buffer("flag", torch.tensor(True))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.cond(self.flag, lambda v: v.sin(), lambda v: v.cos(), (self.c,))

    program = capture(Model(), X)
    assert FoldConstants().run(program).program is program


def test_in_place_annotations_are_forgotten() -> None:
    program = trace(lambda x, c: (x.exp() * c.sin().cos(),), X, C, kinds={1: CONSTANT}).copy()
    next(node for node in program.calls if node.name == "mul").meta["inplace"] = 1
    result = check(FoldConstants(), program.finish(), X)
    assert not any("inplace" in node.meta for node in result.program.graph.nodes)


# -- training -------------------------------------------------------------------------------------------------------


def joint() -> tuple[Program, torch.Tensor]:
    weight = torch.randn(4, 4, requires_grad=True)
    return capture_joint(lambda w, x: ((x @ w.sin()) * torch.arange(4)).exp().sum(), weight, X), weight


def test_training_folds_creations_of_forward_only() -> None:
    program, weight = joint()
    result = check(FoldConstants(), program, weight, X)
    assert [change.before for change in result.changes] == [("arange",)]
    assert result.program.baked == frozenset()
    assert "aten.sin.default" in targets(result.program)


def test_training_never_reads_parameters() -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    program = capture_joint(lambda w, x: (x @ w.sin()).sum(), weight, X)
    result = FoldConstants().run(program)
    assert result.program is program
    assert result.refusals == ()


# -- size -----------------------------------------------------------------------------------------------------------


def test_a_large_graph_takes_linear_time() -> None:
    def function(x: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor]:
        for i in range(200):
            x = x * (c + i).sin()
        return (x,)

    result = FoldConstants().run(trace(function, X, C, kinds={1: CONSTANT}))
    assert len(result.program.calls) == 200
    assert len(result.changes) == 1
