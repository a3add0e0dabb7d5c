"""FuseConvBn: structure, numbers against eager float64, and every refusal with its reason."""

import pytest
import torch
from torch import nn

from memopt.passes.fuse_conv_bn import FuseConvBn
from memopt.program import InputKind
from tests.support import apply, assert_same, capture, run, targets

NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
CONVS = {
    (1, False): nn.Conv1d,
    (2, False): nn.Conv2d,
    (3, False): nn.Conv3d,
    (1, True): nn.ConvTranspose1d,
    (2, True): nn.ConvTranspose2d,
    (3, True): nn.ConvTranspose3d,
}


def randomised(model: nn.Module) -> nn.Module:
    """The model in eval mode, with batch norms that have seen data."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            module.running_mean.normal_()
            module.running_var.uniform_(0.3, 2.0)
            if module.affine:
                nn.init.normal_(module.weight)
                nn.init.normal_(module.bias)
    return model.eval()


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest value expected."""
    return ((found.double() - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.quick("False-1-False-*", "True-4-True-*", "True-1-False-2", "False-2-True-2", "True-2-False-1")
@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_convolutions_equal_eager_in_float64(dimensions, transposed, groups, bias):
    conv = CONVS[dimensions, transposed](4, 8, 3, stride=2, padding=1, groups=groups, bias=bias)
    model = randomised(nn.Sequential(conv, NORMS[dimensions](8, affine=bias, eps=1e-3))).double()
    x = torch.randn(2, 4, *[7] * dimensions, dtype=torch.float64)
    program = capture(model, x)
    result = apply(FuseConvBn(), program)
    assert targets(program) == ["aten.convolution.default", "aten._native_batch_norm_legit_no_training.default"]
    assert targets(result.program) == ["aten.convolution.default"]
    assert result.refusals == ()
    assert error(run(result.program, x)[0], model(x)) <= 1e-12


def test_the_change_names_what_it_replaced_and_what_was_read():
    model = randomised(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()))
    program = capture(model, torch.randn(1, 3, 8, 8))
    result = apply(FuseConvBn(), program)
    (change,) = result.changes
    assert change.before == ("convolution", "_native_batch_norm_legit_no_training", "getitem")
    assert change.after == ("convolution_folded",)
    assert change.summary == "folded _native_batch_norm_legit_no_training into the weights of convolution"
    assert result.program.baked == {
        "p_0_weight", "p_0_bias", "p_1_weight", "p_1_bias", "b_1_running_mean", "b_1_running_var",
    }  # fmt: skip
    kinds = [entry.kind for entry in result.program.inputs]
    assert kinds[: len(program.inputs)] == [entry.kind for entry in program.inputs]
    assert kinds[len(program.inputs) :] == [InputKind.CONSTANT] * 2
    (node,) = [n for n in result.program.calls if n.target is torch.ops.aten.convolution.default]
    assert node.meta["stack_trace"] == program.calls[0].meta["stack_trace"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_no_worse_than_before(dtype):
    model = randomised(nn.Sequential(nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32))).to(dtype)
    x = torch.randn(4, 16, 12, 12).to(dtype)
    program = capture(model, x)
    expected = model.double()(x.double())
    model.to(dtype)
    before = error(run(program, x)[0], expected)
    after = error(run(apply(FuseConvBn(), program).program, x)[0], expected)
    assert after <= FuseConvBn.tolerance * before
    assert run(apply(FuseConvBn(), program).program, x)[0].dtype is dtype


def test_folding_happens_in_float64_and_is_cast_once():
    conv, norm = nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)
    program = capture(randomised(nn.Sequential(conv, norm)).bfloat16(), torch.randn(1, 2, 4, 4).bfloat16())
    after = apply(FuseConvBn(), program).program
    scale = norm.weight.double() / torch.sqrt(norm.running_var.double() + norm.eps)
    weight = (conv.weight.double() * scale.reshape(-1, 1, 1, 1)).bfloat16()
    bias = ((conv.bias.double() - norm.running_mean.double()) * scale + norm.bias.double()).bfloat16()
    assert_same([after.state[entry.name] for entry in after.inputs[-2:]], [weight, bias])


@pytest.mark.parametrize("bias", [False, True])
def test_linear(bias):
    model = randomised(nn.Sequential(nn.Linear(5, 6, bias=bias), nn.BatchNorm1d(6))).double()
    x = torch.randn(4, 5, dtype=torch.float64)
    after = apply(FuseConvBn(), capture(model, x)).program
    assert targets(after) == ["aten.t.default", "aten.addmm.default"]
    assert error(run(after, x)[0], model(x)) <= 1e-12


@pytest.mark.parametrize("bias", [False, True])
def test_linear_flattened_before_the_batch_norm(bias):
    model = randomised(nn.Sequential(nn.Linear(5, 6, bias=bias), nn.Flatten(0, 1), nn.BatchNorm1d(6))).double()
    x = torch.randn(4, 3, 5, dtype=torch.float64)
    after = apply(FuseConvBn(), capture(model, x)).program
    assert "aten._native_batch_norm_legit_no_training.default" not in targets(after)
    assert error(run(after, x)[0], model(x)) <= 1e-12


class Matrix(nn.Module):
    """A linear layer whose weight is [in, out] and whose bias is added by hand."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 6))
        self.bias = nn.Parameter(torch.randn(6))
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        return self.norm(x @ self.weight + self.bias)


def test_linear_without_transpose_and_with_a_bias_of_its_own():
    model = randomised(Matrix()).double()
    x = torch.randn(4, 5, dtype=torch.float64)
    result = apply(FuseConvBn(), capture(model, x))
    assert targets(result.program) == ["aten.addmm.default"]
    assert "p_bias" in result.program.baked
    assert error(run(result.program, x)[0], model(x)) <= 1e-12


class SeparateBias(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.bias, self.shape = nn.Parameter(torch.randn(4)), shape

    def forward(self, x):
        return self.norm(self.bias.view(self.shape) + self.conv(x))


@pytest.mark.parametrize("shape", [(4, 1, 1), (1, 4, 1, 1)])
def test_convolution_with_a_bias_added_separately(shape):
    model = randomised(SeparateBias(shape)).double()
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    result = apply(FuseConvBn(), capture(model, x))
    assert targets(result.program)[-1] == "aten.convolution.default"
    assert "aten.add.Tensor" not in targets(result.program)
    assert error(run(result.program, x)[0], model(x)) <= 1e-12


def test_an_addition_that_varies_over_space_is_no_bias():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
            self.bias = nn.Parameter(torch.randn(4))

        def forward(self, x):
            return self.norm(self.conv(x) + self.bias)

    result = apply(FuseConvBn(), capture(Model().eval(), torch.randn(2, 3, 4, 4)))
    assert result.changes == ()


def test_channels_last_is_kept():
    model = randomised(nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)))
    model = model.to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last)
    after = apply(FuseConvBn(), capture(model, x)).program
    (out,) = run(after, x)
    assert out.stride() == model(x).stride() == after.output_nodes[0].meta["val"].stride()


class Bottleneck(nn.Module):
    """A ResNet bottleneck: three convolutions with batch norms, and one in the shortcut."""

    def __init__(self):
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(8, 4, 1, bias=False), nn.BatchNorm2d(4)
        self.c2, self.b2 = nn.Conv2d(4, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4)
        self.c3, self.b3 = nn.Conv2d(4, 16, 1, bias=False), nn.BatchNorm2d(16)
        self.c4, self.b4 = nn.Conv2d(8, 16, 1, 2, bias=False), nn.BatchNorm2d(16)

    def forward(self, x):
        y = self.b1(self.c1(x)).relu()
        y = self.b2(self.c2(y)).relu()
        return (self.b3(self.c3(y)) + self.b4(self.c4(x))).relu()


def test_a_bottleneck_loses_all_its_batch_norms():
    model = randomised(Bottleneck()).double()
    x = torch.randn(2, 8, 9, 9, dtype=torch.float64)
    result = apply(FuseConvBn(), capture(model, x))
    assert len(result.changes) == 4
    assert targets(result.program).count("aten.convolution.default") == 4
    assert not any("batch_norm" in target for target in targets(result.program))
    assert error(run(result.program, x)[0], model(x)) <= 1e-12


def test_two_batch_norms_in_a_row_are_both_folded():
    model = randomised(nn.Sequential(nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4), nn.BatchNorm1d(4))).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    result = apply(FuseConvBn(), capture(model, x))
    assert targets(result.program) == ["aten.convolution.default"]
    assert sum(entry.kind is InputKind.CONSTANT for entry in result.program.inputs) == 2
    assert error(run(result.program, x)[0], model(x)) <= 1e-12


def test_a_second_run_changes_nothing():
    program = capture(randomised(Bottleneck()), torch.randn(2, 8, 9, 9))
    once = apply(FuseConvBn(), program).program
    assert apply(FuseConvBn(), once).program is once
