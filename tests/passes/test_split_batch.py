"""SplitBatch: convolutions and their neighbours on parts of the batch, in both phases of a training step."""

import operator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memopt.passes.eliminate_copies import EliminateCopies
from memopt.passes.split_batch import SplitBatch, own_bytes
from memopt.program import Phase
from tests.passes.build import arguments, capture_joint, check, reasons, trace
from tests.support import apply, targets

aten = torch.ops.aten


def data(*shape, dtype=torch.float32, seed=0, grad=True):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad)


def split(program, parts=2):
    return apply(SplitBatch(parts, least_bytes=1), program)


def joint(function, *tensors):
    """As passes that come before it leave a program: without aliases."""
    return EliminateCopies().run(capture_joint(function, *tensors)).program


def operands(dtype=torch.float32, batch=6):
    """Images, and the weights and biases of two convolutions."""
    x = data(batch, 3, 12, 12, dtype=dtype, grad=False)
    weights = [data(8, 3, 3, 3, dtype=dtype, seed=1), data(8, dtype=dtype, seed=2)]
    return [x, *weights, data(4, 8, 3, 3, dtype=dtype, seed=3), data(4, dtype=dtype, seed=4)]


def network(between=F.relu, behind=lambda x: x):
    def loss(x, w1, b1, w2, b2):
        x = between(F.conv2d(x, w1, b1, padding=1))
        return behind(F.conv2d(x, w2, b2, padding=1)).square().mean()

    return loss


def values_of(program, tensors):
    """The program's arguments, tangents in the dtype that it expects."""
    nodes = [n for n, entry in zip(program.placeholders, program.inputs, strict=True) if entry.kind.value != "constant"]
    given = arguments(program, *tensors)
    return [value.to(node.meta["val"].dtype) for value, node in zip(given, nodes, strict=True)]


def results(program, tensors):
    torch.manual_seed(0)
    return [value for value in program.run(*values_of(program, tensors)) if isinstance(value, torch.Tensor)]


def assert_as_exact(after, before, function, tensors):
    """As close to float64 as before, within a factor, and laid out as before."""
    double = [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
    exact = capture_joint(function, *double)
    truth = exact.run(*[v.double() if v.is_floating_point() else v for v in values_of(before, tensors)])
    found, plain = results(after, tensors), results(before, tensors)
    truth = [value for value in truth if isinstance(value, torch.Tensor)]
    for new, old, true in zip(found, plain, truth, strict=True):
        assert new.stride() == old.stride() and new.dtype is old.dtype
        floor = 8 * torch.finfo(new.dtype).eps * true.abs().max()
        assert (new.double() - true).abs().max() <= 4 * (old.double() - true).abs().max() + floor


@pytest.mark.quick("torch.float32-2", "torch.float32-6", "torch.bfloat16-9")
@pytest.mark.parametrize("parts", [2, 4, 6, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_and_gradients_beside_float64(parts, dtype):
    tensors = operands(dtype)
    before = joint(network(), *tensors)
    result = split(before, parts)
    assert len(result.changes) == 2, "one stretch for each phase"
    calls = targets(result.program)
    assert calls.count("aten.convolution.default") == 2 * min(parts, 6)
    assert calls.count("aten.convolution_backward.default") == 2 * min(parts, 6)
    assert_as_exact(result.program, before, network(), tensors)


def test_what_stretches_alone_read_stays_in_parts():
    tensors = operands()
    result = split(joint(network(), *tensors), 2)
    whole = [node for node in result.program.calls if node.name.endswith("_whole")]
    assert [tuple(node.meta["val"].shape) for node in whole] == [(6, 4, 12, 12)], "what the loss reads"
    saved = {
        operand.name
        for node in result.program.calls
        if node.meta["phase"] is Phase.BACKWARD
        for operand in node.all_input_nodes
        if operand.meta.get("phase") is Phase.FORWARD
    }
    assert saved >= {"relu_part", "relu_part_1"}


@pytest.mark.quick(
    "*Pool2d*",
    "*nearest*",
    "*bilinear*",
    "Softmax*",
    "LogSoftmax*",
    "GELU*",
    "Hardswish*",
    "function*",
    "ZeroPad2d*",
)
@pytest.mark.parametrize(
    "between",
    [
        nn.MaxPool2d(2),
        nn.MaxPool2d(3, 2, 1),
        nn.AvgPool2d(2),
        nn.AdaptiveAvgPool2d(6),
        nn.Upsample(scale_factor=2),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Upsample(scale_factor=2, mode="bicubic"),
        nn.Softmax(1),
        nn.LogSoftmax(3),
        nn.GELU(),
        nn.Hardswish(),
        lambda x: F.group_norm(x, 2),
        nn.ZeroPad2d(1),
        lambda x: torch.cat((x, x.roll(1, 1)), 1)[:, 4:12],
        lambda x: x + x.mean((2, 3), keepdim=True).sigmoid(),
        lambda x: x.contiguous(memory_format=torch.channels_last),
    ],
    ids=lambda between: repr(between) if isinstance(between, nn.Module) else "function",
)
def test_neighbours(between):
    tensors = operands()
    before = joint(network(between), *tensors)
    result = split(before, 3)
    assert result.changes
    assert_as_exact(result.program, before, network(between), tensors)


def test_pools_and_resizing_do_not_end_a_stretch():
    for between in (
        nn.MaxPool2d(2),
        nn.AvgPool2d(2),
        nn.Upsample(scale_factor=2),
        nn.Upsample(scale_factor=2, mode="bilinear"),
    ):
        result = split(joint(network(between), *operands()), 3)
        assert len(result.changes) == 2 and "convolution_1" in result.changes[0].before, between


class Pool(torch.autograd.Function):
    """Max pooling whose gradient is spelled out as Inductor does it: sums at places, in rows of zeros."""

    @staticmethod
    def forward(ctx, x):
        values, places = F.max_pool2d(x, 2, return_indices=True)
        ctx.save_for_backward(places)
        ctx.shape = x.shape
        return values

    @staticmethod
    def backward(ctx, gradient):
        (places,) = ctx.saved_tensors
        batch, channels, height, width = ctx.shape
        rows = torch.full((batch * channels, height * width), 0.0, dtype=torch.float32)
        values = gradient.float().reshape(batch * channels, -1)
        rows = torch.scatter_add(rows, 1, places.reshape(batch * channels, -1), values)
        return rows.view(ctx.shape).to(gradient.dtype)


def test_sums_at_places_do_not_end_a_stretch():
    tensors = operands()
    before = joint(network(Pool.apply), *tensors)
    assert "aten.scatter_add.default" in targets(before)
    result = split(before, 3)
    assert len(result.changes) == 2
    filled = [node for node in result.program.calls if node.target is aten.full.default and node.meta["val"].dim() == 2]
    assert [tuple(node.meta["val"].shape) for node in filled] == [(2 * 8, 144)] * 3, "each part has its own zeros"
    assert_as_exact(result.program, before, network(Pool.apply), tensors)


def test_results_that_are_taken_apart_late_stay_in_their_stretch():
    mixing = network(lambda x: F.relu(x.softmax(0)))  # ends stretches
    before = joint(mixing, *operands())
    late = before.copy()
    gradients_of = {node.name for node in late.output_nodes if node is not None}
    items = [node for node in late.calls if node.name in gradients_of and node.target is operator.getitem]
    for node in items:  # gradients of weights and biases, far behind what makes them
        late.graph.output_node().prepend(node)
    late = late.finish()
    result = split(late, 3)
    assert items and len(result.changes) == len(split(before, 3).changes) == 4
    assert_as_exact(result.program, before, mixing, operands())


def test_a_bias_whose_gradient_is_a_sum_of_its_own():
    def loss(x, w, b):
        return (F.conv2d(x, w, padding=1) + b).square().sum()

    tensors = [data(4, 3, 8, 8, grad=False), data(8, 3, 3, 3, seed=1), data(8, 1, 1, seed=2)]
    before = joint(loss, *tensors)
    result = split(before)
    assert any(name.startswith("sum") for change in result.changes for name in change.before)
    assert_as_exact(result.program, before, loss, tensors)


def test_large_sums_are_added_up_part_by_part(monkeypatch):
    monkeypatch.setattr("memopt.passes.split_batch._SMALL", 0)
    for dtype in (torch.float32, torch.bfloat16):
        tensors = operands(dtype)
        before = joint(network(), *tensors)
        result = split(before, 4)
        sums = [node for node in result.program.calls if "_sum" in node.name]
        assert len(sums) == 4 * 3 and {node.meta["val"].dtype for node in sums} == {torch.float32}
        assert_as_exact(result.program, before, network(), tensors)


def test_weights_that_are_cast_for_the_step():
    """As autocast does: the cast stands before the stretch, that of the gradient behind it."""

    def loss(x, w1, w2):
        x = F.relu(F.conv2d(x, w1.bfloat16(), padding=1))
        return F.conv2d(x, w2.bfloat16(), padding=1).float().square().mean()

    x = data(4, 3, 12, 12, dtype=torch.bfloat16, grad=False)
    tensors = [x, data(8, 3, 3, 3, seed=1), data(4, 8, 3, 3, seed=2)]
    before = joint(loss, *tensors)
    result = split(before)
    assert len(result.changes) == 2
    assert targets(result.program).count("aten.convolution.default") == 4
    found, expected = results(result.program, tensors), results(before, tensors)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_channels_last_stays():
    tensors = operands()
    tensors[0] = tensors[0].contiguous(memory_format=torch.channels_last)
    tensors[1] = tensors[1].detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    before = joint(network(), *tensors)
    result = split(before, 3)
    images = [node.meta["val"] for node in result.program.calls if node.target is aten.convolution.default]
    assert len(images) == 6 and all(image.is_contiguous(memory_format=torch.channels_last) for image in images)
    assert_as_exact(result.program, before, network(), tensors)


def test_windows_of_a_gradient_are_copied_out_of_it():
    def loss(x, w1, w2, w3):
        one = F.relu(F.conv2d(x, w1, padding=1))
        other = F.conv2d(F.relu(one), w2, padding=1)
        other = F.batch_norm(other, None, None, training=True)  # a stretch ends here
        return F.conv2d(torch.cat((one, other), 1), w3, padding=1).square().mean()

    tensors = [data(4, 3, 16, 16, grad=False), data(8, 3, 3, 3), data(8, 8, 3, 3, seed=1), data(8, 16, 3, 3, seed=2)]
    before = joint(loss, *tensors)
    result = split(before)
    kept = [node for node in result.program.calls if node.target is aten.clone.default]
    assert kept and all(node.meta["val"].untyped_storage().nbytes() == 2 * 8 * 16 * 16 * 4 for node in kept)
    torch.testing.assert_close(results(result.program, tensors), results(before, tensors), rtol=1e-4, atol=1e-5)


def test_batch_norm_ends_a_stretch():
    def loss(x, w1, b1, w2, b2):
        x = F.batch_norm(F.conv2d(x, w1, b1, padding=1), None, None, training=True)
        return F.conv2d(F.relu(x), w2, b2, padding=1).square().mean()

    tensors = operands()
    before = joint(loss, *tensors)
    result = split(before)
    (norm,) = [node.name for node in before.calls if "batch_norm" in str(node.target) and "backward" not in node.name]
    assert "takes mean and variance over the whole batch" in reasons(result)[norm]
    assert targets(result.program).count("aten.convolution.default") == 4
    assert_as_exact(result.program, before, loss, tensors)


def test_dropout_draws_what_it_drew():
    def loss(x, w1, b1, w2, b2):
        x = F.dropout(F.relu(F.conv2d(x, w1, b1, padding=1)), 0.5)
        return F.dropout(F.conv2d(x, w2, b2, padding=1), 0.3).square().mean()

    tensors = operands()
    before = joint(loss, *tensors)
    result = split(before)
    assert targets(result.program).count("aten.convolution_backward.default") == 4
    assert any("draws random numbers" in reason for reason in reasons(result).values())
    torch.testing.assert_close(results(result.program, tensors), results(before, tensors), rtol=1e-5, atol=1e-6)


def test_one_operation_needs_less_by_itself():
    tensors = operands()
    before = joint(network(), *tensors)
    after = split(before, 3).program
    heaviest = [max(own_bytes(node) for node in program.calls) for program in (before, after)]
    slices = tensors[0].numel() * 4  # a part of a value from outside needs that as a whole
    assert heaviest[1] - slices < 0.6 * heaviest[0]


def test_refusals():
    tensors = operands()
    program = capture_joint(network(), *tensors)
    small = check(SplitBatch(2), program, *tensors)
    assert small.program is program
    assert "parts of it would take as long as the whole" in reasons(small)["convolution"]

    deeper = SplitBatch(2).deeper  # where nothing else keeps a limit
    assert apply(deeper, program).changes and deeper.parts == 2 and deeper.deeper is None
    assert (SplitBatch().key, SplitBatch().deeper.key) == ("split_batch", "split_batch:1")

    def many(x, *weights):
        wide = x.repeat(1, 200, 1, 1) * weights[0][0, 0, 0, 0]
        return network()(x, *weights) + wide.sin().exp().sum()

    deep = check(SplitBatch(2, least_bytes=1), capture_joint(many, *tensors), *tensors)
    assert not deep.changes and "recomputing lowers the rest" in reasons(deep)["convolution"]
    one = operands(batch=1)
    program = capture_joint(network(), *one)
    alone = check(SplitBatch(2, least_bytes=1), program, *one)
    assert alone.program is program and "there is no batch to divide" in reasons(alone)["convolution"]

    def strided(x, w1, b1, w2, b2):
        x = F.conv2d(x, w1, b1, padding=1)
        return F.conv2d(torch.as_strided(x * 1, x.shape, x.stride()), w2, b2).square().mean()

    program = capture_joint(strided, *tensors)
    result = split(program)
    assert "counts from the beginning of the whole storage" in " ".join(reasons(result).values())
    assert_as_exact(result.program, program, strided, tensors)


def test_what_is_left_alone():
    x, w = data(4, 3), data(3, 3, seed=1)
    linear = capture_joint(lambda x, w: (x @ w).square().sum(), x, w)
    assert check(SplitBatch(least_bytes=1), linear, x, w).program is linear
    inference = trace(lambda x, w: (F.conv2d(x, w),), data(4, 3, 8, 8, grad=False), data(4, 3, 3, 3, grad=False))
    assert check(SplitBatch(least_bytes=1), inference, data(4, 3, 8, 8), data(4, 3, 3, 3)).program is inference
    with pytest.raises(ValueError, match="at least 2"):
        SplitBatch(1)
