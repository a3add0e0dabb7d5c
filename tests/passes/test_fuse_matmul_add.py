"""FuseMatmulAdd: structure, numbers against float64, and every refusal with its reason."""

import dataclasses

import pytest
import torch
from torch import nn

from memopt.passes.fuse_matmul_add import FuseMatmulAdd
from memopt.program import Output, OutputKind, Phase
from tests.support import Apply, apply, assert_same, capture, run, targets


def normal(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def fused(function, *args):
    """The operators after the pass and the whole result; numbers must equal eager's to 1e-12."""
    result = apply(FuseMatmulAdd(), capture(Apply(function), *args))
    assert_same(run(result.program, *args), [function(*args)], rtol=1e-12, atol=1e-12)
    return targets(result.program), result


A, B = (3, 4), (4, 6)


@pytest.mark.quick("shape2-*", "*-<lambda>0")
@pytest.mark.parametrize(
    "function",
    [
        lambda a, b, c: a @ b + c,
        lambda a, b, c: c + a @ b,
        lambda a, b, c: torch.add(a @ b, c, alpha=3),
        lambda a, b, c: torch.add(c, a @ b, alpha=-0.5),
        lambda a, b, c: a @ b - c,
        lambda a, b, c: c - a @ b,
        lambda a, b, c: torch.sub(c, a @ b, alpha=2),
        lambda a, b, c: (a @ b) * 2 + c,
        lambda a, b, c: c - (a @ b) / 3,
        lambda a, b, c: torch.add(c, (a @ b) * 0.25, alpha=2),
    ],
)
@pytest.mark.parametrize("shape", [(), (1,), (6,), (1, 6), (3, 1), (3, 6)])
def test_every_form_of_a_sum_becomes_one_addmm(function, shape):
    names, result = fused(function, normal(*A), normal(*B), normal(*shape))
    assert names == ["aten.addmm.default"]
    assert result.refusals == ()


def test_factors_become_alpha_and_beta():
    _, result = fused(lambda a, b, c: torch.add((a @ b) * 2, c, alpha=3), normal(*A), normal(*B), normal(6))
    (node,) = result.program.calls
    assert node.kwargs == {"alpha": 2.0, "beta": 3.0}
    _, result = fused(lambda a, b, c: c - (a @ b) / 4, normal(*A), normal(*B), normal(6))
    (node,) = result.program.calls
    assert node.kwargs == {"alpha": -0.25}


def test_the_change_names_what_became_one():
    _, result = fused(lambda a, b, c: (a @ b) * 2 + c, normal(*A), normal(*B), normal(6))
    (change,) = result.changes
    assert change.summary == "add became part of mm"
    assert change.before == ("mm", "mul", "add")
    assert change.after == ("mm_fused",)


@pytest.mark.parametrize("shape", [(6,), (1,), (1, 1, 6), (2, 3, 6)])
def test_a_view_moves_behind_the_sum(shape):
    names, _ = fused(lambda a, b, c: a @ b + c, normal(2, 3, 4), normal(4, 6), normal(*shape))
    assert "aten.addmm.default" in names
    assert names[-1] == "aten._unsafe_view.default"
    assert "aten.add.Tensor" not in names


@pytest.mark.parametrize("shape", [(6,), (3, 6), (1, 1, 6), (2, 3, 6), (2, 1, 6), (2, 1, 1)])
def test_batches(shape):
    names, _ = fused(lambda a, b, c: torch.bmm(a, b) / 2 + c, normal(2, 3, 4), normal(2, 4, 6), normal(*shape))
    assert names == ["aten.baddbmm.default"]


@pytest.mark.parametrize("shape", [(6,), (3, 6), (1, 1, 3, 6), (2, 5, 3, 6), (2, 5, 1, 6)])
def test_batches_of_two_dimensions(shape):
    names, _ = fused(lambda a, b, c: a @ b * 0.5 + c, normal(2, 5, 3, 4), normal(2, 5, 4, 6), normal(*shape))
    assert "aten.baddbmm.default" in names
    assert "aten.add.Tensor" not in names
    assert "aten.mul.Tensor" not in names


def test_of_two_products_the_later_takes_the_earlier():
    names, result = fused(lambda a, b, c, d: a @ b + c @ d, *(normal(5, 5) for _ in range(4)))
    assert names == ["aten.mm.default", "aten.addmm.default"]
    assert result.changes[0].before == ("mm_1", "add")


def test_a_chain_of_sums_takes_one_addend_each():
    names, _ = fused(lambda a, b, c, d: a @ b + c + d @ b, normal(*A), normal(*B), normal(6), normal(*A))
    assert names == ["aten.addmm.default", "aten.addmm.default"]


def test_a_linear_layer_without_bias_takes_the_residual():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

        def forward(self, x):
            return x + self.down(torch.relu(self.up(x)))

    model, x = Block().double(), normal(2, 5, 8)
    program = capture(model, x)
    after = apply(FuseMatmulAdd(), program).program
    assert targets(after).count("aten.addmm.default") == 1
    assert_same(run(after, x), [model(x)], rtol=1e-12, atol=1e-12)


def test_a_second_run_changes_nothing():
    _, result = fused(lambda a, b, c: a @ b + c, normal(*A), normal(*B), normal(6))
    assert apply(FuseMatmulAdd(), result.program).program is result.program


@pytest.mark.quick("rows0-*", "rows2-1000.0-*")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1.0, 1000.0])
@pytest.mark.parametrize("rows", [(64,), (2, 32), (4, 16)])
def test_rounding_is_within_the_tolerance(dtype, size, rows):
    a, b = normal(*rows, 512, dtype=dtype), normal(512, 32, dtype=dtype)
    c = (normal(*rows, 32) * size).to(dtype)
    program = capture(Apply(lambda a, b, c: a @ b * 0.125 + c), a, b, c)
    expected = a.double() @ b.double() * 0.125 + c.double()
    before = (run(program, a, b, c)[0].double() - expected).abs().max()
    after = (run(apply(FuseMatmulAdd(), program).program, a, b, c)[0].double() - expected).abs().max()
    assert after <= FuseMatmulAdd.tolerance * before


# -- refusals -------------------------------------------------------------------------------------------------


def refusals(function, *args):
    program = capture(Apply(function), *args)
    result = apply(FuseMatmulAdd(), program)
    assert result.program is program
    return [(refusal.node, refusal.reason) for refusal in result.refusals]


def test_refused_when_the_product_has_other_users():
    def function(a, b, c):
        product = a @ b
        return product + c, product.relu()

    found = refusals(function, normal(*A), normal(*B), normal(6))
    assert found == [("add", "mm, which it adds to, has other users")]


def test_refused_when_the_product_is_an_output():
    def function(a, b, c):
        product = a @ b
        return product * 2 + c, product

    found = refusals(function, normal(*A), normal(*B), normal(6))
    assert found == [("add", "mm, which it adds to, has other users")]


def test_refused_when_the_scaled_product_has_other_users():
    def function(a, b, c):
        scaled = a @ b * 2
        return scaled + c + scaled.relu()

    found = refusals(function, normal(*A), normal(*B), normal(6))
    assert found == [("add", "mul, which it adds to, has other users")]


def test_refused_when_dtypes_differ():
    args = normal(*A, dtype=torch.float32), normal(*B, dtype=torch.float32), normal(6)
    (found,) = refusals(lambda a, b, c: a @ b + c, *args)
    assert found == ("add", "add is torch.float64 on cpu, the product torch.float32 on cpu")
    args = normal(*A), normal(*B), normal(6, dtype=torch.float32)
    (found,) = refusals(lambda a, b, c: a @ b + c, *args)
    assert found == ("add", "args_2 is torch.float32 on cpu, the product torch.float64 on cpu")


def test_refused_for_integers():
    args = (torch.ones(A, dtype=torch.int64), torch.ones(B, dtype=torch.int64), torch.ones(6, dtype=torch.int64))
    found = refusals(lambda a, b, c: a @ b + c, *args)
    assert found == [("add", "the product is of torch.int64, no floating-point dtype")]


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b, c: torch.add(a @ b, c, alpha=0),
        lambda a, b, c: (a @ b) * 0 + c,
        lambda a, b, c: (a @ b) / 0 + c,
        lambda a, b, c: (a @ b) * float("nan") + c,
    ],
)
def test_refused_when_a_factor_is_zero_or_not_finite(function):
    found = refusals(function, normal(*A), normal(*B), normal(6))
    assert found == [("add", "a factor of the sum is zero or not finite")]


def test_refused_when_the_sum_is_larger():
    found = refusals(lambda a, b, c: a @ b + c, normal(1, 4), normal(*B), normal(3, 6))
    assert found == [("add", "the sum is larger than the product")]


@pytest.mark.parametrize("shape", [(3, 6), (2, 1, 6)])
def test_refused_when_the_addend_has_no_view_in_the_products_shape(shape):
    found = refusals(lambda a, b, c: a @ b + c, normal(2, 3, 4), normal(4, 6), normal(*shape))
    assert found == [("add", "args_2 has no view in the product's shape")]


def test_refused_when_the_addends_strides_allow_no_view():
    found = refusals(lambda a, b, c: a @ b + c.transpose(0, 1), normal(2, 3, 4), normal(4, 6), normal(3, 2, 6))
    assert found == [("add", "transpose has no view in the product's shape")]


def test_refused_when_only_some_batches_share_the_addend():
    found = refusals(lambda a, b, c: a @ b + c, normal(2, 5, 3, 4), normal(2, 5, 4, 6), normal(2, 1, 3, 6))
    assert found == [("add", "args_2 has no view in the product's shape")]


def test_refused_when_the_sum_is_laid_out_otherwise():
    found = refusals(lambda a, b, c: c.t() + a @ b, normal(3, 4), normal(4, 6), normal(6, 3))
    assert found == [("add", "the sum is laid out otherwise than the product")]


def test_waits_for_a_later_addend_when_operands_are_small():
    names, _ = fused(lambda a, b, c: (a * 2) @ b + c.relu(), normal(64, 2), normal(2, 64), normal(64, 64))
    assert names == ["aten.mul.Tensor", "aten.relu.default", "aten.addmm.default"]


def test_refused_when_waiting_for_the_addend_keeps_more():
    def function(a, b, c):
        return (a * 2) @ b + c.relu()

    found = refusals(function, normal(2, 64), normal(64, 2), normal(2, 2))
    assert found == [("add", "its addend comes later: waiting would keep 1024 bytes of operands, the product has 32")]


def test_waits_when_the_operands_live_on_anyway():
    def function(a, b, c):
        doubled = a * 2
        return doubled @ b + c.relu(), doubled.sum()

    program = capture(Apply(function), *(args := (normal(2, 64), normal(64, 2), normal(2, 2))))
    result = apply(FuseMatmulAdd(), program)
    assert "aten.addmm.default" in targets(result.program)
    assert_same(run(result.program, *args), list(function(*args)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "function", [lambda a, b: a @ b + 1, lambda a, b: (m := a @ b) + m, lambda a, b: a.sum() + b.sum()]
)
def test_what_is_no_sum_of_a_product_is_left_alone(function):
    assert refusals(function, normal(*A), normal(*B)) == []


def test_training_programs_are_returned_unchanged():
    program = capture(Apply(lambda a, b, c: a @ b + c), normal(*A), normal(*B), normal(6))
    for node in program.calls:
        node.meta["phase"] = Phase.FORWARD
    training = dataclasses.replace(program, training=True, forward_outputs=1, outputs=(Output(OutputKind.USER),))
    assert FuseMatmulAdd().run(training).program is training
