"""The table of fused operators: what a node's activation is, which operator stands for it, and when it is unfit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memopt.patterns.fused_ops import FUSED_OPS, LAYERS, Activation, activation_of, fused_op
from memopt.program import Program
from tests.passes.build import trace
from tests.support import capture

aten = torch.ops.aten
X = torch.linspace(-8, 8, 2 * 6 * 5 * 5).reshape(2, 6, 5, 5)
CPU = [entry for entry in FUSED_OPS if entry.device == "cpu"]
FUNCTIONS = {
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": F.silu,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 2.0),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
PARAMETERS = {"leaky_relu": (0.2,), "hardtanh": (-0.5, 2.0)}


def last(program: Program) -> torch.fx.Node:
    return program.calls[-1]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_activation_is_known_by_name_and_parameters(name) -> None:
    program = trace(lambda x: (FUNCTIONS[name](x),), X)
    assert activation_of(last(program)) == Activation(name, PARAMETERS.get(name, ()))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x.clamp(min=0), Activation("relu")),
        (F.relu6, Activation("hardtanh", (0.0, 6.0))),
        (F.leaky_relu, Activation("leaky_relu", (0.01,))),
        (F.mish, Activation("mish")),
        (F.elu, Activation("elu")),
        (torch.sin, None),
        (lambda x: x + 1, None),
        (F.softplus, None),
    ],
)
def test_other_spellings_defaults_and_strangers(function, expected) -> None:
    assert activation_of(last(trace(lambda x: (function(x),), X))) == expected


def test_the_table_has_one_entry_per_device_layer_and_activation() -> None:
    keys = [(entry.device, entry.layer, entry.activation) for entry in FUSED_OPS]
    assert len(set(keys)) == len(keys)
    assert {layer for _, layer, _ in keys} <= {*LAYERS.values(), "convolution_add"}
    for entry in FUSED_OPS:
        assert fused_op(entry.device, entry.layer, Activation(entry.activation, (1.0,))) is entry
    assert fused_op("cpu", "addmm", Activation("silu")) is None
    assert fused_op("xpu", "addmm", Activation("relu")) is None
    assert fused_op("cpu", "convolution_add", Activation("relu")) is None


def layer_of(program: Program) -> torch.fx.Node:
    (found,) = [node for node in program.calls if node.target in LAYERS]
    return found


def run(program: Program, call, *users: torch.Tensor) -> torch.Tensor:
    """What an engine operator's call gives on the program's inputs."""
    target, args, kwargs = call
    given = iter(users)
    values = {n: program.state[n.name] if n.name in program.state else next(given) for n in program.placeholders}
    for node in program.calls:
        if node is layer_of(program):
            break
        values[node] = node.target(*torch.fx.map_arg(node.args, values.get), **node.kwargs)
    return target(*torch.fx.map_arg(args, values.get), **kwargs)


@pytest.mark.parametrize("entry", CPU, ids=lambda entry: f"{entry.layer}-{entry.activation}")
def test_every_operator_of_the_cpu_computes_its_activation(entry) -> None:
    torch.manual_seed(0)
    activation = Activation(entry.activation, PARAMETERS.get(entry.activation, ()))
    if entry.layer == "addmm":
        model, x = nn.Linear(6, 6).eval(), X[:, :, 0, 0] * 2
    else:
        model = nn.Conv2d(6, 8, 3, stride=2, padding=1).eval().to(memory_format=torch.channels_last)
        x = X.to(memory_format=torch.channels_last)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    program = capture(model, x)
    node = layer_of(program)
    assert entry.unfit(program, node) is None
    found = run(program, entry.build(node, None, activation), x)
    expected = FUNCTIONS[entry.activation](model.double()(x.double()))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("entry", [e for e in CPU if e.keeps_nan], ids=lambda e: f"{e.layer}-{e.activation}")
def test_operators_that_keep_nan_do(entry) -> None:
    activation = Activation(entry.activation, PARAMETERS.get(entry.activation, ()))
    x = X.to(memory_format=torch.channels_last) if entry.layer == "convolution" else X[:, :, 0, 0]
    model = nn.Conv2d(6, 8, 3) if entry.layer == "convolution" else nn.Linear(6, 6)
    model = model.to(memory_format=torch.channels_last).requires_grad_(False)
    x = torch.full_like(x, torch.nan)
    program = capture(model.eval(), x)
    assert run(program, entry.build(layer_of(program), None, activation), x).isnan().all()


@pytest.mark.parametrize(
    ("model", "x", "reason"),
    [
        (nn.ConvTranspose2d(6, 4, 3), X, "transposed convolutions"),
        (nn.Conv1d(6, 4, 3), X[:, :, 0], "two dimensions"),
    ],
)
def test_reasons_against_onednn(model, x, reason) -> None:
    program = capture(model.eval(), x)
    (entry,) = [e for e in CPU if e.layer == "convolution" and e.activation == "relu"]
    assert reason in str(entry.unfit(program, layer_of(program)))


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_an_addmm_keeps_its_factors(activation) -> None:
    def function(bias, x, w):
        return (aten.addmm.default(bias, x, w, beta=0.5, alpha=2.0),)

    bias, x, w = torch.linspace(-1, 1, 6), X[:, :, 0, 0], torch.linspace(-1, 1, 36).reshape(6, 6)
    program = trace(function, bias, x, w)
    entry = fused_op("cpu", "addmm", Activation(activation))
    call = entry.build(layer_of(program), None, Activation(activation))
    found = run(program, call, bias, x, w)
    torch.testing.assert_close(found, FUNCTIONS[activation](0.5 * bias + 2 * (x @ w)), rtol=1e-5, atol=1e-5)


def test_fake_kernels_of_cudnn_lay_out_as_the_convolution_does() -> None:
    weight, bias = torch.zeros(8, 6, 3, 3, device="meta"), torch.zeros(8, device="meta")
    geometry = ([2, 2], [1, 1], [1, 1], 1)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        x = X.to("meta").to(memory_format=memory_format)
        found = aten.cudnn_convolution_relu.default(x, weight, bias, *geometry)
        assert found.shape == (2, 8, 3, 3) and found.is_contiguous(memory_format=memory_format)
        more = aten.cudnn_convolution_add_relu.default(x, weight, found, 1.0, bias, *geometry)
        assert (more.shape, more.stride()) == (found.shape, found.stride())
