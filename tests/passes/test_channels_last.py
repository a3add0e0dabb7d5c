"""ChannelsLast: convolutions of a training step on images laid out channels last, gradients as their parameters lie."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import memopt
from memopt.backends.inductor import missing_compiler
from memopt.compilation.layout import JudgedByCost
from memopt.memory.cost.devices import DEVICES
from memopt.memory.cost.table import CostTable
from memopt.passes.channels_last import ChannelsLast
from memopt.step.stages import judged
from tests.end_to_end import build, gradients, resident_bytes, restorer, step
from tests.passes.build import arguments, capture_joint, reasons, trace
from tests.support import apply, targets

aten = torch.ops.aten
LAST = torch.channels_last
ALWAYS = (ChannelsLast(always=True), *memopt.TRAINING[1:])


def data(*shape, dtype=torch.float32, seed=0, grad=True):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad)


def operands(dtype=torch.float32):
    """Images, and the weights of two convolutions."""
    x, last = data(2, 3, 12, 12, dtype=dtype, grad=False), data(4, 8, 1, 1, dtype=dtype, seed=3)
    return [x, data(8, 3, 3, 3, dtype=dtype, seed=1), data(8, dtype=dtype, seed=2), last]


def network(between=F.relu, behind=lambda x: x.square().mean()):
    def loss(x, w1, b1, w2):
        return behind(F.conv2d(between(F.conv2d(x, w1, b1, padding=1)), w2))

    return loss


def laid_out(function, *tensors):
    program = capture_joint(function, *tensors)
    return program, apply(ChannelsLast(always=True), program)


def images(program, target=aten.convolution.default, position=0):
    return [node.args[position].meta["val"] for node in program.calls if node.target is target]


def assert_same_step(program, result, tensors):
    """Outputs and gradients near what they were, with exactly the same strides."""
    values = arguments(program, *tensors)
    results = result.program.run(*values), program.run(*values), program.output_nodes
    for found, expected, node in zip(*results, strict=True):
        if expected is not None:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            assert found.stride() == expected.stride() == node.meta["val"].stride()


def test_all_images_lie_last_and_all_gradients_as_before():
    program, result = laid_out(network(), *operands())
    assert len(result.changes) == 4
    for target, positions in ((aten.convolution.default, (0, 1)), (aten.convolution_backward.default, (0, 1, 2))):
        for position in positions:
            assert all(x.is_contiguous(memory_format=LAST) for x in images(result.program, target, position))
    assert_same_step(program, result, operands())
    # Of the image, of the first weight and its gradient, and of the loss's; the second weight lies last as it is.
    assert targets(result.program).count("aten.clone.default") == targets(program).count("aten.clone.default") + 4


@pytest.mark.parametrize(
    "between",
    [
        lambda x: F.max_pool2d(F.silu(x), 2),
        lambda x: F.interpolate(F.avg_pool2d(x, 2), scale_factor=2.0),
        lambda x: F.pad(torch.cat((x, x.tanh()), 1)[:, :8], (1, 1)),
        lambda x: F.batch_norm(x, None, None, training=True) + x,
        lambda x: F.group_norm(x, 2),
        lambda x: F.hardswish(x) * F.adaptive_avg_pool2d(x, 1),
    ],
)
def test_neighbours_follow(between):
    program, result = laid_out(network(between), *operands())
    assert all(x.is_contiguous(memory_format=LAST) for x in images(result.program))
    assert_same_step(program, result, operands())


@pytest.mark.parametrize(
    "behind",
    [
        lambda x: x.flatten(1).square().mean(),
        lambda x: x.permute(0, 2, 3, 1).reshape(-1, 4).logsumexp(1).mean(),
        lambda x: F.cross_entropy(x, torch.zeros(2, 12, 12, dtype=torch.int64)),
        lambda x: x.as_strided((2, 4), (576, 144)).sum(),
        lambda x: F.pixel_shuffle(x, 2).square().mean(),
    ],
)
def test_what_asks_for_a_layout_gets_it(behind):
    program, result = laid_out(network(behind=behind), *operands())
    assert len(result.changes) == 4
    assert_same_step(program, result, operands())


def test_a_flattened_image_is_copied_back_and_the_report_says_so():
    _, result = laid_out(network(behind=lambda x: x.flatten(1).square().mean()), *operands())
    assert "asks for the layout that its operands had: copied back" in reasons(result).values()


@pytest.mark.parametrize("behind", [lambda x: x, lambda x: x[:, :2], lambda x: x.transpose(1, 3), lambda x: x[0]])
def test_the_caller_gets_what_it_got(behind):
    program, result = laid_out(network(behind=behind), *operands())
    assert_same_step(program, result, operands())


def test_three_dimensions_and_transposed_convolutions():
    def loss(x, w, v):
        return F.conv_transpose3d(F.relu(F.conv3d(x, w, padding=1)), v, stride=2).square().mean()

    tensors = [data(2, 3, 4, 6, 6, grad=False), data(8, 3, 3, 3, 3), data(8, 4, 2, 2, 2)]
    program, result = laid_out(loss, *tensors)
    assert all(x.is_contiguous(memory_format=torch.channels_last_3d) for x in images(result.program))
    assert_same_step(program, result, tensors)


def test_random_draws_are_those_that_they_were():
    program, result = laid_out(network(lambda x: F.dropout(x, 0.5, training=True)), *operands())
    values = arguments(program, *operands())
    found = []
    for item in (program, result.program):
        torch.manual_seed(3)
        found.append(item.run(*values))
    torch.testing.assert_close(*found)


def test_what_lies_last_already_is_left_alone():
    x, w1, b1, w2 = operands()
    tensors = x.to(memory_format=LAST), w1.detach().to(memory_format=LAST).requires_grad_(), b1, w2
    program, result = laid_out(network(behind=lambda x: (x * x).sum()), *tensors)
    assert result.program is program


def test_what_is_left_alone():
    inference = trace(lambda x, w: (F.conv2d(x, w),), data(2, 3, 8, 8, grad=False), data(4, 3, 3, 3, grad=False))
    lines = capture_joint(lambda x, w: F.conv1d(x, w).square().mean(), data(2, 3, 8), data(4, 3, 3))
    for program in (inference, lines):
        assert apply(ChannelsLast(always=True), program).program is program
    program = capture_joint(network(), *operands())
    assert ChannelsLast().run(program).program is program  # nothing decides
    assert ChannelsLast(JudgedByCost(CostTable())).run(program).program is program  # a CPU


class Refusing:
    def may_gain(self, program):
        return True

    def __call__(self, before, after):
        return "slower"


def test_a_judge_has_the_last_word():
    program = capture_joint(network(), *operands())
    result = apply(ChannelsLast(Refusing()), program)
    assert result.program is program and list(reasons(result).values()) == ["slower"]
    first = judged(memopt.TRAINING, Refusing())[0]
    assert isinstance(first, ChannelsLast) and isinstance(first.judge, Refusing)
    assert ChannelsLast(first.judge).judged_by(JudgedByCost(CostTable())).judge is first.judge


@pytest.mark.parametrize(("dtype", "last"), [(torch.bfloat16, True), (torch.float64, False)])
def test_for_a_device_that_is_not_here_it_is_estimated(dtype, last):
    def loss(x, w, v):
        return F.conv2d(F.relu(F.conv2d(x, w, padding=1)), v, padding=1).square().mean()

    tensors = [data(4, 64, 256, 256, dtype=dtype, grad=False), *(data(64, 64, 3, 3, dtype=dtype) for _ in range(2))]
    table = CostTable(target=DEVICES["h100"])
    with FakeTensorMode(allow_non_fake_inputs=True):  # a CPU would take minutes for what is only to be captured
        program = capture_joint(loss, *tensors)
    result = ChannelsLast(JudgedByCost(table)).run(program)
    assert bool(result.changes) == last
    placed = table.placed(result.program)
    taken = [table.cost(node).workspace_bytes for node in placed.calls if node.target is aten.convolution.default]
    assert all(size == 0 for size in taken) == last
    if last:  # as cuDNN lays it out, though there is none here
        assert all(x.is_contiguous(memory_format=LAST) for x in images(placed))


def test_where_nothing_is_gained_it_says_what_was_compared():
    tiny = [data(1, 3, 6, 6, dtype=torch.bfloat16, grad=False), data(4, 3, 3, 3, dtype=torch.bfloat16)]
    program = capture_joint(lambda x, w: F.conv2d(x, w).square().mean(), *tiny)
    result = ChannelsLast(JudgedByCost(CostTable(target=DEVICES["h100"]))).run(program)
    assert result.program is program
    (reason,) = reasons(result).values()
    assert reason.startswith("channels last they take") and reason.endswith("ms as they are")


# -- whole models ----------------------------------------------------------------------------------------------------


def budget_between(model, inputs, share):
    report = memopt.plan(model, inputs)
    torch._dynamo.reset()
    return int(report.minimum_bytes + share * (report.unconstrained_bytes - report.minimum_bytes))


@pytest.mark.quick("aten-unet")
@pytest.mark.parametrize(
    "name",
    [
        "unet",
        "resnet18",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("densenet121", "mobilenet_v3_small")),
    ],
)
@pytest.mark.parametrize("backend", ["aten", pytest.param("inductor", marks=pytest.mark.slow)])
def test_models_train_as_eager_does_in_the_bytes_that_were_predicted(name, backend):
    if backend == "inductor" and missing_compiler(torch.device("cpu")) is not None:
        pytest.skip("no C++ compiler")
    torch._dynamo.reset()
    model, inputs = build(name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # Inductor draws other numbers
    exact = copy.deepcopy(model).double()
    wide = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
    step(exact, wide)
    eager = copy.deepcopy(model)
    step(eager, inputs)
    # Weights that are laid out anew take room beside eager's own peak, which bounds what a share is of.
    budget = budget_between(model, inputs, 0.9)
    run = memopt.compile(model, budget, backend=backend, passes=ALWAYS, verify=False)
    step(run, inputs)
    (record,) = [record for record in run.report.passes if record.name == "channels_last"]
    assert record.changes
    largest = max(float(value.abs().max()) for value in gradients(exact))
    for name, parameter in model.named_parameters():
        assert parameter.grad.stride() == parameter.stride(), name
        reference = exact.get_parameter(name).grad
        before = float((eager.get_parameter(name).grad.double() - reference).abs().max())
        assert float((parameter.grad.double() - reference).abs().max()) <= 4 * before + 1e-4 * largest
    restore = restorer(model)
    restore()
    model.zero_grad()
    measured = resident_bytes(model, inputs) + memopt.measure(lambda: step(run, inputs), device="cpu").peak_bytes
    assert measured <= run.report.peak_bytes <= budget
    if backend == "aten":
        assert run.report.peak_bytes == measured


def conversion_seconds(run, inputs):
    """What cuDNN takes in a step to change the layout of images."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        step(run, inputs)
        torch.cuda.synchronize()
    return sum(
        event.self_device_time_total
        for event in profile.key_averages()
        if "nchwToNhwc" in event.key or "nhwcToNchw" in event.key
    )


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_a_unet_on_a_device_runs_channels_last_with_few_conversions(backend):
    model = memopt.models.build("unet").to("cuda", torch.bfloat16)
    inputs = model.example_inputs(2, labels=True)
    step(model, inputs)
    before = conversion_seconds(model, inputs)
    run = memopt.compile(model, backend=backend)
    step(run, inputs)
    (record,) = [record for record in run.report.passes if record.name == "channels_last"]
    assert len(record.changes) == 45
    assert all(parameter.grad.stride() == parameter.stride() for parameter in model.parameters())
    assert conversion_seconds(run, inputs) < before / 4
