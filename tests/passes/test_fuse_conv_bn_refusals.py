"""Batch norms that stay, and why."""

import dataclasses

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from memopt.passes.fuse_conv_bn import FuseConvBn
from memopt.program import Output, OutputKind, Phase
from tests.passes.test_fuse_conv_bn import randomised
from tests.support import apply, capture


def refused(model, *args, edit=lambda program: program):
    """The only reason given; nothing may have changed."""
    program = edit(capture(model, *args))
    result = apply(FuseConvBn(), program)
    assert result.program is program
    (refusal,) = result.refusals
    assert "batch_norm" in refusal.node
    return refusal.reason


class Apply(nn.Module):
    def __init__(self, function, **modules):
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *args):
        return self.function(self, *args)


def pair():
    return {"conv": nn.Conv2d(3, 3, 3, padding=1), "norm": nn.BatchNorm2d(3)}


IMAGE = torch.linspace(-1, 1, 2 * 3 * 5 * 5).reshape(2, 3, 5, 5)


def test_refused_when_the_result_has_other_users():
    def function(m, x):
        y = m.conv(x)
        return m.norm(y) + y

    model = randomised(Apply(function, **pair()))
    assert refused(model, IMAGE) == "convolution, which it normalises, has other users"


def test_refused_when_the_result_is_an_output():
    def function(m, x):
        y = m.conv(x)
        return m.norm(y), y

    model = randomised(Apply(function, **pair()))
    assert refused(model, IMAGE) == "convolution, which it normalises, has other users"


def test_refused_when_weight_is_shared():
    model = randomised(Apply(lambda m, x: m.norm(m.conv(x)) + m.conv(x + 1), **pair()))
    assert refused(model, IMAGE) == "p_conv_weight, which convolution reads, is shared"


def test_refused_when_another_parameter_has_the_weights_storage():
    def function(m, x):
        return m.norm(m.conv(x)) + m.other(x)

    model = randomised(Apply(function, **pair(), other=nn.Conv2d(3, 3, 3, padding=1)))
    model.other.weight = nn.Parameter(model.conv.weight.detach())
    assert refused(model, IMAGE) == "p_conv_weight, which convolution reads, is shared"


def test_refused_when_the_bias_is_shared():
    def function(m, x):
        return m.norm(m.conv(x)) * m.conv.bias.sum()

    assert refused(randomised(Apply(function, **pair())), IMAGE) == "p_conv_bias, which convolution reads, is shared"


def test_refused_when_the_weight_is_computed():
    def function(m, x):
        return m.norm(nn.functional.conv2d(x, m.conv.weight * 2))

    assert refused(randomised(Apply(function, **pair())), IMAGE) == "the weight of convolution is computed"


def test_refused_when_the_bias_is_computed():
    def function(m, x):
        return m.norm(nn.functional.conv2d(x, m.conv.weight, m.conv.bias * 2))

    assert refused(randomised(Apply(function, **pair())), IMAGE) == "the bias of convolution is computed"


def test_refused_when_the_weight_is_an_argument_of_the_call():
    def function(m, x, weight):
        return m.norm(nn.functional.conv2d(x, weight))

    model = randomised(Apply(function, norm=nn.BatchNorm2d(3)))
    assert refused(model, IMAGE, torch.randn(3, 3, 1, 1)) == "args_1 has no known value"


def test_refused_when_values_are_fake():
    def fake(program):
        mode = FakeTensorMode()
        return dataclasses.replace(program, state={k: mode.from_tensor(v) for k, v in program.state.items()})

    program = fake(capture(randomised(Apply(lambda m, x: m.norm(m.conv(x)), **pair())), IMAGE))
    (refusal,) = FuseConvBn().run(program).refusals
    assert refusal.reason == "p_conv_weight has no known value"


def test_refused_in_training_mode():
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, track_running_stats=False)

        def forward(self, x):
            return self.norm(self.conv(x))

    reason = "it is in training mode: it normalises by the statistics of the batch"
    assert refused(Frozen().eval(), IMAGE) == reason
    assert refused(Apply(lambda m, x: m.norm(m.conv(x)), **pair()).train(), IMAGE) == reason


def test_refused_when_the_program_changes_a_statistic():
    def function(m, x):
        y = m.norm(m.conv(x))
        m.norm.running_mean.add_(1)
        return y

    model = randomised(Apply(function, **pair()))
    assert refused(model, IMAGE) == "b_norm_running_mean is changed by the program"


def test_refused_when_the_scale_is_not_finite():
    model = randomised(Apply(lambda m, x: m.norm(m.conv(x)), **pair()))
    model.norm.running_var[1] = -1.0
    assert refused(model, IMAGE) == "its scale, or a value folded with it, is not finite"


def test_refused_when_a_folded_weight_overflows():
    model = randomised(Apply(lambda m, x: m.norm(m.conv(x)), **pair())).half()
    with torch.no_grad():
        model.norm.weight.fill_(6e4)
        model.conv.weight.fill_(4.0)
    assert refused(model, IMAGE.half()) == "its scale, or a value folded with it, is not finite"


def test_refused_when_dtypes_differ():
    model = randomised(Apply(lambda m, x: m.norm(m.conv(x)), **pair()))
    model.conv.bfloat16()
    assert refused(model, IMAGE.bfloat16()) == "p_norm_weight is torch.float32, the weight torch.bfloat16"


def test_refused_when_the_batch_norm_does_not_run_over_the_features():
    model = randomised(nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(4)))
    reason = "it normalises dimension 1, but the features of addmm are in the last dimension"
    assert refused(model, torch.randn(2, 4, 5)) == reason
    square = randomised(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)))
    assert refused(square, torch.randn(2, 4, 5)) == reason


def test_refused_when_a_view_stands_between():
    def function(m, x):
        return m.norm(m.conv(x).reshape(2, 3, 25, 1))

    assert refused(randomised(Apply(function, **pair())), IMAGE) == "a view stands between the convolution and it"


def test_refused_when_addmm_scales():
    def function(m, x):
        return m.norm(torch.addmm(m.linear.bias, x, m.linear.weight, alpha=2.0))

    model = randomised(Apply(function, norm=nn.BatchNorm1d(4), linear=nn.Linear(4, 4)))
    assert refused(model, torch.randn(3, 4)) == "addmm scales its operands"


def test_refused_when_the_bias_of_a_linear_is_no_vector():
    def function(m, x):
        return m.norm(torch.addmm(x, x, m.linear.weight))

    model = randomised(Apply(function, norm=nn.BatchNorm1d(4), linear=nn.Linear(4, 4)))
    assert refused(model, torch.randn(3, 4)) == "the bias of addmm is computed, or no vector"


def test_refused_when_the_linear_weight_is_computed():
    def function(m, x):
        return m.norm(x @ (m.linear.weight * 2))

    model = randomised(Apply(function, norm=nn.BatchNorm1d(4), linear=nn.Linear(4, 4)))
    assert refused(model, torch.randn(3, 4)) == "the weight of mm is computed"


def test_refused_before_the_convolution():
    model = randomised(Apply(lambda m, x: m.conv(m.norm(x)), **pair()))
    assert refused(model, IMAGE) == "it precedes its convolution: at zero padding its shift would be missing"


def test_refused_when_the_saved_statistics_are_used():
    def function(m, x):
        n = m.norm
        return torch.ops.aten._native_batch_norm_legit_no_training(
            m.conv(x), n.weight, n.bias, n.running_mean, n.running_var, 0.1, 1e-5
        )

    assert refused(randomised(Apply(function, **pair())), IMAGE) == "its saved statistics are used"


def test_a_batch_norm_on_something_else_is_left_alone():
    result = apply(FuseConvBn(), capture(randomised(nn.Sequential(nn.ReLU(), nn.BatchNorm2d(3))), IMAGE))
    assert result.changes == result.refusals == ()


def test_training_programs_are_returned_unchanged():
    program = capture(randomised(Apply(lambda m, x: m.norm(m.conv(x)), **pair())), IMAGE)
    for node in program.calls:
        node.meta["phase"] = Phase.FORWARD
    training = dataclasses.replace(
        program, training=True, forward_outputs=1, outputs=(Output(OutputKind.USER),) * len(program.outputs)
    )
    assert FuseConvBn().run(training).program is training
