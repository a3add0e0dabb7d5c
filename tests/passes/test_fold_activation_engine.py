"""Activations that a layer's own operator computes, and where it does not."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memopt.passes.fold_activation import FoldActivation
from memopt.program import Output, OutputKind, Phase
from tests.passes.convolutions import LAST, Bottleneck, conv, images
from tests.passes.test_fold_activation import folded, refusals
from tests.support import Apply, apply, assert_same, capture, run, targets

ONEDNN = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")


@pytest.mark.quick("shape0-*", "shape1-gelu-dtype2")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.GELU()], ids=["relu", "gelu"])
@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 8)])
def test_a_linear_layer_takes_its_activation_bitwise(dtype, activation, shape):
    model = nn.Sequential(nn.Linear(8, 16), activation, nn.Linear(16, 4)).to(dtype)
    x = torch.randn(shape).to(dtype)
    program, result = folded(model, x)
    names = targets(result.program)
    assert names.count("aten._addmm_activation.default") == 1
    assert "aten.relu.default" not in names
    assert "aten.gelu.default" not in names
    assert_same(run(result.program, x), run(program, x))


def test_a_spelled_out_gelu_joins_its_linear_layer():
    model = Apply(None, linear=nn.Linear(8, 8))
    model.function = lambda x: 0.5 * (y := model.linear(x)) * (1 + torch.erf(y / math.sqrt(2)))
    _, result = folded(model, torch.randn(3, 8))
    assert targets(result.program) == ["aten.t.default", "aten._addmm_activation.default"]
    assert [change.summary for change in result.changes] == ["mul_1 spells out gelu", "gelu became part of addmm"]
    assert result.changes[1].after == ("addmm_gelu",)


def test_scaled_addmm_keeps_its_factors():
    def function(a, b, c):
        return torch.addmm(c, a, b, alpha=2.0, beta=-1.0).relu()

    args = torch.randn(3, 4), torch.randn(4, 5), torch.randn(5)
    program, result = folded(function, *args)
    (node,) = result.program.calls
    assert node.kwargs == {"alpha": 2.0, "beta": -1.0, "use_gelu": False}
    assert_same(run(result.program, *args), run(program, *args))


def test_engine_false_leaves_layers_alone():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    assert refusals(model, torch.randn(3, 8), engine=False) == []


@pytest.mark.quick("*-8", "activation0-*")
@ONEDNN
@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize(
    ("activation", "nan_free"),
    [
        (nn.Sigmoid(), False),
        (nn.Tanh(), False),
        (nn.SiLU(), False),
        (nn.Hardswish(), False),
        (nn.LeakyReLU(0.2), False),
        (nn.LeakyReLU(), False),
        (nn.GELU("tanh"), False),
        (nn.ReLU(), True),
        (nn.ReLU6(), True),
        (nn.Hardtanh(-0.5, 0.25), True),
        (nn.Hardsigmoid(), True),
        (nn.GELU(), False),
    ],
)
def test_a_convolution_takes_its_activation(activation, nan_free, groups):
    model = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1, stride=2, groups=groups), activation).to(memory_format=LAST)
    x = images()
    program, result = folded(model, x, nan_free=nan_free)
    assert targets(result.program) == ["mkldnn._convolution_pointwise.default"]
    exact = nn.Sequential(model[0].double(), activation)(x.double())
    before, after = ((run(item, x)[0].double() - exact).abs().max() for item in (program, result.program))
    assert after <= 2 * before
    assert run(result.program, x)[0].stride() == result.program.output_nodes[0].meta["val"].stride()
    if not nan_free:
        x[0, 0, 0, 0] = math.nan
        assert_same(run(result.program, x)[0].isnan(), run(program, x)[0].isnan())


class InvertedResidual(nn.Module):
    """A MobileNetV3 block after its batch norms have been folded: expand, depthwise, squeeze and excite, project."""

    def __init__(self):
        super().__init__()
        self.expand, self.depth = nn.Conv2d(8, 16, 1), nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.squeeze, self.excite = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
        self.project = nn.Conv2d(16, 8, 1)

    def forward(self, x):
        y = F.hardswish(self.expand(x))
        y = self.depth(y)
        y = y * F.relu6(y + 3) / 6
        scale = self.excite(F.relu(self.squeeze(y.mean((2, 3), keepdim=True))))
        return x + self.project(y * F.hardsigmoid(scale))


@ONEDNN
def test_a_mobilenet_block():
    torch.set_num_threads(2)  # on one thread torch does not run 1x1 convolutions by oneDNN
    model, x = InvertedResidual().to(memory_format=LAST), images()
    program, result = folded(model, x)
    assert targets(result.program).count("mkldnn._convolution_pointwise.default") == 2
    assert "aten.hardswish.default" not in targets(result.program)
    assert_same(run(result.program, x), run(program, x), rtol=1e-5, atol=1e-5)
    assert apply(FoldActivation(), result.program).program is result.program


@ONEDNN
def test_a_bottleneck_by_consent():
    torch.set_num_threads(2)
    model, x = Bottleneck().to(memory_format=LAST), images(size=24)
    program, result = folded(model, x, nan_free=True)
    assert targets(result.program).count("mkldnn._convolution_pointwise.default") == 2
    assert [refusal.reason for refusal in result.refusals] == [
        "the cpu engine has no operator that computes convolution and add and relu at once"
    ]
    assert_same(run(result.program, x), run(program, x), rtol=1e-5, atol=1e-5)


def test_refused_when_the_operator_would_hide_nan():
    (reason,) = refusals(conv(nn.ReLU()), images())
    assert reason == (
        "the engine's operator for convolution and relu may turn NaN into a number; nan_free=True allows it"
    )


def test_refused_without_an_operator():
    assert refusals(conv(nn.Mish()), images()) == [
        "the cpu engine has no operator that computes convolution and mish at once"
    ]
    assert refusals(nn.Sequential(nn.Linear(8, 8), nn.SiLU()), torch.randn(3, 8)) == [
        "the cpu engine has no operator that computes addmm and silu at once"
    ]
    assert refusals(nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU()), torch.randn(3, 8)) == [
        "no engine computes mm and relu at once"
    ]


@ONEDNN
def test_refused_for_the_layout():
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.SiLU())
    assert refusals(model, images().contiguous()) == [
        "its result is not channels-last: the fused operator would take more memory, or lay it out otherwise"
    ]


@ONEDNN
def test_refused_where_another_library_runs_the_convolution():
    model = nn.Sequential(nn.Conv2d(8, 8, 1), nn.SiLU()).to(memory_format=LAST)
    assert refusals(model, images(size=4, batch=1)) == [
        "oneDNN does not run this convolution: it is faster elsewhere, or oneDNN is off"
    ]


def test_refused_for_the_dtype():
    assert refusals(conv(nn.SiLU()).bfloat16(), images().bfloat16()) == [
        "the engine's operator for convolution and silu is not for torch.bfloat16"
    ]


def test_refused_for_transposed_convolutions():
    model = nn.Sequential(nn.ConvTranspose2d(8, 8, 3), nn.SiLU()).to(memory_format=LAST)
    assert refusals(model, images()) == ["the engine has no such operator for transposed convolutions"]


def test_refused_without_onednn(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert refusals(conv(nn.SiLU()), images()) == ["this build of torch has no oneDNN"]


def test_refused_when_the_layers_result_has_other_users_or_is_returned():
    model = Apply(None, layer=nn.Linear(8, 8))
    model.function = lambda x: (y := model.layer(x)).relu() + y
    assert refusals(model, torch.randn(3, 8)) == ["addmm, which it is to join, has other users"]
    model.function = lambda x: ((y := model.layer(x)).relu(), y)
    assert refusals(model, torch.randn(2, 3, 8)) == ["view_1, which it is to join, has other users"]


def test_training_programs_are_returned_unchanged():
    program = capture(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(3, 8))
    for node in program.calls:
        node.meta["phase"] = Phase.FORWARD
    training = dataclasses.replace(program, training=True, forward_outputs=1, outputs=(Output(OutputKind.USER),))
    assert FoldActivation().run(training).program is training
