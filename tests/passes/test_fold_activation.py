"""FoldActivation: spellings, nested activations and engine operators; numbers against float64, and every refusal."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memopt.passes.fold_activation import FoldActivation
from tests.support import Apply, apply, assert_same, capture, run, targets


def folded(function, *args, **options):
    program = capture(function if isinstance(function, nn.Module) else Apply(function), *args)
    return program, apply(FoldActivation(**options), program)


def rewritten(function, *args, **options):
    return targets(folded(function, *args, **options)[1].program)


def refusals(function, *args, **options):
    """The reasons; nothing may have changed."""
    program, result = folded(function, *args, **options)
    assert result.program is program
    return [refusal.reason for refusal in result.refusals]


def errors(function, x, **options):
    """Largest float64 error before and after."""
    program, result = folded(function, x, **options)
    exact = function(x.double())
    return [(run(item, x)[0].double() - exact).abs().max().item() for item in (program, result.program)]


def gelu_new(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def gelu_fast(x):
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


SPELLINGS = {
    "gelu": [
        lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
        lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
        lambda x: x * (0.5 * (torch.erf(x * 0.7071067811865476) + 1)),
        lambda x: x / 2 * (1 + torch.erf(x * math.sqrt(0.5))),
        lambda x: 0.5 * x + 0.5 * x * torch.erf(x / math.sqrt(2)),
        lambda x: x * (0.5 + torch.erf(x / math.sqrt(2)) * 0.5),
        lambda x: x * 0.5 * (1 - torch.erf(-x / math.sqrt(2))),
    ],
    "gelu_tanh": [
        gelu_new,
        lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * x * (1 + 0.044715 * x**2))),
        lambda x: x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))),
    ],
    "silu": [
        lambda x: x * torch.sigmoid(x),
        lambda x: torch.sigmoid(x) * x,
        lambda x: x / (1 + torch.exp(-x)),
        lambda x: x / (torch.exp(x * -1.0) + 1.0),
        lambda x: x * (1 / (1 + torch.exp(-x))),
    ],
    "sigmoid": [lambda x: torch.reciprocal(1 + torch.exp(-x))],
    "hardswish": [
        lambda x: x * F.relu6(x + 3) / 6,
        lambda x: x * (F.relu6(x + 3) / 6),
        lambda x: F.relu6(x + 3.0) * x * (1 / 6),
        lambda x: x * torch.clamp(x + 3, 0, 6) / 6,
        lambda x: x * F.hardtanh(x + 3, 0.0, 6.0) / 6,
        lambda x: x * F.hardsigmoid(x),
        lambda x: x * torch.clamp(x / 6 + 0.5, 0, 1),
        lambda x: x * torch.clamp(0.5 + x * (1 / 6), min=0.0, max=1.0),
    ],
    "hardsigmoid": [
        lambda x: F.relu6(x + 3) / 6,
        lambda x: torch.clamp(x + 3, 0, 6) * (1 / 6),
        lambda x: torch.clamp(x / 6 + 0.5, 0, 1),
    ],
    "mish": [lambda x: x * torch.tanh(F.softplus(x)), lambda x: F.softplus(x).tanh() * x],
}
CASES = [pytest.param(name, form, id=f"{name}{i}") for name, forms in SPELLINGS.items() for i, form in enumerate(forms)]


@pytest.mark.parametrize(("name", "function"), CASES)
def test_a_spelled_out_activation_becomes_one_operation(name, function):
    x = torch.linspace(-12, 12, 401)
    program, result = folded(function, x)
    assert targets(result.program) == [f"aten.{name.removesuffix('_tanh')}.default"]
    (node,) = result.program.calls
    assert node.kwargs == ({"approximate": "tanh"} if name == "gelu_tanh" else {})
    assert result.changes[-1].after == (node.name,)
    before, after = errors(function, x)
    assert after <= 4 * before + 1e-6
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 30.0, -30.0]).repeat(67)[:401]
    found, expected = run(result.program, special)[0], run(program, special)[0]
    assert_same(found.isfinite(), expected.isfinite())
    assert_same(found[found.isfinite()], expected[found.isfinite()], rtol=1e-5, atol=1e-6)
    assert_same(found[special.isnan()], special[special.isnan()])


@pytest.mark.quick("gelu-*", "hardswish-dtype1", "silu-dtype2", "sigmoid-dtype1", "mish-dtype0")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SPELLINGS)
def test_other_dtypes(name, dtype):
    x = torch.linspace(-9, 9, 301).to(dtype)
    function = SPELLINGS[name][0]
    assert rewritten(function, x) == [f"aten.{name.removesuffix('_tanh')}.default"]
    before, after = errors(function, x)
    assert after <= 2 * before + 1e-14


def test_the_change_names_all_of_the_expression():
    _, result = folded(lambda x: x * F.relu6(x + 3) / 6, torch.randn(4))
    (change,) = result.changes
    assert change.before == ("add", "hardtanh", "mul", "div")
    assert change.after == ("hardswish",)
    assert change.summary == "div spells out hardswish"


def test_a_scalar_that_the_program_owns_is_a_constant():
    model = Apply(None)
    model.scale = torch.tensor(0.5)
    model.function = lambda x: x * model.scale * (1 + torch.erf(x / math.sqrt(2)))
    assert rewritten(model, torch.randn(4)) == ["aten.gelu.default"]


def test_the_operand_may_be_an_expression_itself():
    names = rewritten(lambda x: (y := 2 * x + 1) * torch.sigmoid(y), torch.randn(4))
    assert names == ["aten.mul.Tensor", "aten.add.Tensor", "aten.silu.default"]


@pytest.mark.parametrize("function", [gelu_new, gelu_fast], ids=["new", "fast"])
def test_hugging_face_spellings(function):
    activations = pytest.importorskip("transformers.activations")
    x = torch.linspace(-8, 8, 201)
    for model in (activations.ACT2FN["gelu_new" if function is gelu_new else "gelu_fast"], function):
        assert rewritten(model, x) == ["aten.gelu.default"]
    assert rewritten(activations.NewGELUActivation(), x) == ["aten.gelu.default"]
    assert rewritten(activations.ACT2FN["gelu_python"], x) == ["aten.gelu.default"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * torch.sigmoid(x + 1),
        lambda x: 0.5 * x * (1 + torch.erf(x)),
        lambda x: x * F.relu6(x + 2) / 6,
        lambda x: x * torch.tanh(F.softplus(x, beta=2.0)),
        lambda x: x / (2 + torch.exp(-x)),
        lambda x: x * torch.sigmoid(x.flip(0)),
        lambda x: x[:, None] * torch.sigmoid(x),
        lambda x: x.pow(2.5) * torch.erf(x / 0),
    ],
)
def test_what_only_looks_alike_is_left_alone(function):
    assert refusals(function, torch.rand(5)) == []


def test_quick_gelu_is_refused():
    activations = pytest.importorskip("transformers.activations")
    for function in (activations.ACT2FN["quick_gelu"], lambda x: x * torch.sigmoid(1.702 * x)):
        assert refusals(function, torch.rand(5)) == ["it is x * sigmoid(1.702 x), which is neither silu nor gelu"]


def test_a_part_that_is_an_activation_is_found_in_a_larger_sum():
    assert rewritten(lambda x: x + x * torch.sigmoid(x), torch.rand(5)) == ["aten.silu.default", "aten.add.Tensor"]


def test_refused_when_constants_are_coarse():
    (reason,) = refusals(lambda x: x * 0.5 * (1 + torch.erf(x / 1.4142)), torch.randn(4))
    assert reason.startswith("it has the form of gelu, but its constants are off by 9.6e-06")


def test_constants_good_enough_for_float32_are_too_coarse_for_float64():
    assert rewritten(gelu_fast, torch.randn(4)) == ["aten.gelu.default"]
    (reason,) = refusals(gelu_fast, torch.randn(4, dtype=torch.float64))
    assert reason.endswith("more than torch.float64 rounds")


def test_refused_when_an_intermediate_is_used_or_returned():
    def used(x):
        curve = torch.erf(x / math.sqrt(2))
        return 0.5 * x * (1 + curve), curve

    assert refusals(used, torch.randn(4)) == ["it spells out gelu, but erf has other users"]

    def read(x):
        gate = torch.sigmoid(x)
        return x * gate + gate

    assert "it spells out silu, but sigmoid has other users" in refusals(read, torch.randn(4))


def test_dtypes_that_change_on_the_way_are_left_alone():
    assert refusals(lambda x: x * torch.sigmoid(x.double()), torch.randn(4)) == []


# -- nested and idempotent ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x.relu().relu(), ["relu"]),
        (lambda x: x.abs().abs().abs(), ["abs"]),
        (lambda x: x.sigmoid().relu(), ["sigmoid"]),
        (lambda x: x.clamp(0, 6).relu(), ["clamp"]),
        (lambda x: F.relu6(x).relu(), ["hardtanh"]),
        (lambda x: x.clamp(-1, 5).clamp(0, 3).clamp(max=9), ["clamp"]),
        (lambda x: x.relu().clamp(max=6), ["clamp"]),
        (lambda x: x.clamp(min=-1).relu(), ["relu"]),
        (lambda x: x.clamp(3, 1).clamp(0, 2), ["clamp"]),
        (lambda x: x.floor().floor(), ["floor"]),
        (lambda x: x.sigmoid().sigmoid(), ["sigmoid", "sigmoid"]),
        (lambda x: x.tanh().tanh(), ["tanh", "tanh"]),
    ],
)
def test_nested_activations(function, expected):
    x = torch.cat([torch.linspace(-8, 8, 99), torch.tensor([math.nan, math.inf, -math.inf])])
    _, result = folded(function, x)
    assert targets(result.program) == [f"aten.{name}.default" for name in expected]
    assert_same(run(result.program, x), [function(x)])


def test_refused_when_the_first_clamp_has_other_users():
    def function(x):
        y = x.clamp(-1, 1)
        return y.relu() + y

    assert refusals(function, torch.randn(4)) == ["clamp, the clamp before it, has other users"]


def test_refused_when_both_are_returned():
    def function(x):
        y = x.relu()
        return y, y.relu()

    assert refusals(function, torch.randn(4)) == ["it changes nothing, but it and relu are both returned"]


def test_refused_when_only_the_layout_changes():
    def function(x):
        return x.relu().expand(4, 4).relu()

    program, result = folded(function, torch.randn(4))
    assert result.program is program

    def strided(x):
        return torch.ops.aten.abs(torch.ops.aten.abs(x[::2, ::2]))

    assert rewritten(strided, torch.randn(4, 4)) == ["aten.slice.Tensor", "aten.slice.Tensor", "aten.abs.default"]
