"""ShrinkIndices: the same bits from one or two bytes an index, in every geometry, and what is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor import lowering as lowering  # its decompositions of pooling need it
from torch._inductor.decomposition import select_decomp_table

import memopt
from memopt.difference.regions import differing_regions
from memopt.evidence import prove
from memopt.memory.timeline import timeline
from memopt.passes.eliminate_copies import EliminateCopies
from memopt.passes.shrink_indices import ShrinkIndices
from memopt.program import Phase
from tests.end_to_end import build, gradients, restorer, step
from tests.passes.build import capture_joint, check, reasons
from tests.support import targets

SHAPES = {2: (2, 3, 12, 12), 3: (2, 3, 8, 8, 8)}
POOLS = {2: F.max_pool2d, 3: F.max_pool3d}
# kernel, stride, padding, dilation, ceil_mode
APART = [(2, 2, 0, 1, False), (3, 3, 0, 1, False), ((2, 3), (2, 3), 0, 1, False)]
OTHERS = [(3, 2, 1, 1, False), (3, 1, 0, 1, False), (2, 3, 0, 1, False), (3, 2, 1, 2, False), (5, 5, 0, 1, True)]


def data(shape, dtype=torch.float32, memory_format=torch.contiguous_format):
    """Few distinct values, so that windows have ties; zeros of both signs; a NaN."""
    torch.manual_seed(0)
    x = torch.randint(-2, 3, shape).to(dtype)
    x[x == 0] *= torch.where(torch.rand(int((x == 0).sum())) < 0.5, -1.0, 1.0).to(dtype)
    x.view(-1)[5] = float("nan")
    return x.contiguous(memory_format=memory_format).requires_grad_()


def saved(program):
    """Dtypes of what crosses from forward to backward."""
    return {
        str(node.meta["val"].dtype)
        for node in program.calls
        if node.meta["phase"] is Phase.FORWARD
        and isinstance(node.meta["val"], torch.Tensor)
        and any(user.meta.get("phase") is Phase.BACKWARD for user in node.users)
    }


def geometry(options):
    names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
    return dict(zip(names, options, strict=True))


@pytest.mark.parametrize("options", APART + OTHERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_dimensions(options, dtype):
    x = data(SHAPES[2], dtype)

    def loss(x):
        return F.max_pool2d(x.clone(), **geometry(options)).square().float().sum()

    before = capture_joint(loss, x)
    result = check(ShrinkIndices(), before, x)
    assert len(result.changes) == 1 and result.refusals == ()
    assert "torch.int64" in saved(before) and "torch.int64" not in saved(result.program)
    apart = options in APART
    assert ("aten.max_pool2d_with_indices_backward.default" in targets(result.program)) is not apart
    assert timeline(result.program).saved_bytes < timeline(before).saved_bytes


@pytest.mark.parametrize("options", [(2, 2, 0, 1, False), (3, 2, 1, 1, False)], ids=str)
def test_three_dimensions(options):
    x = data(SHAPES[3])
    before = capture_joint(lambda x: F.max_pool3d(x.clone(), **geometry(options)).square().sum(), x)
    result = check(ShrinkIndices(), before, x)
    assert len(result.changes) == 1
    assert "torch.int64" not in saved(result.program)


def test_images_with_the_channels_last_or_without_a_batch():
    for x in (data(SHAPES[2], memory_format=torch.channels_last), data(SHAPES[2][1:])):
        for options in (APART[0], OTHERS[0]):
            before = capture_joint(
                lambda x, options=options: F.max_pool2d(x * 2, **geometry(options)).square().sum(), x
            )
            result = check(ShrinkIndices(), before, x)
            assert len(result.changes) == 1
            assert "torch.int64" not in saved(result.program)


@pytest.mark.parametrize(("width", "dtype"), [(100, "int8"), (200, "uint8"), (300, "int16"), (40000, "int32")])
def test_offsets_take_the_fewest_bytes_that_hold_them(width, dtype):
    x = data((1, 1, 4, width))
    result = check(ShrinkIndices(), capture_joint(lambda x: F.max_pool2d(x * 2, 2).square().sum(), x), x)
    assert f"torch.{dtype}" in saved(result.program)


def test_a_gradient_of_minus_zero_arrives_as_zero():
    x = torch.randn(1, 1, 4, 4, requires_grad=True)
    check(ShrinkIndices(), capture_joint(lambda x: (F.max_pool2d(x * 1.5, 2) * -0.0).sum(), x), x)


@pytest.mark.parametrize("options", [APART[0], OTHERS[0]], ids=str)
def test_inductor_s_offsets_are_compared_or_expanded_late(options):
    x, w = data(SHAPES[2]), torch.randn(3, 3, 1, 1, requires_grad=True)
    x = torch.nan_to_num(x.detach()).requires_grad_()

    def loss(x, w):
        return F.conv2d(F.max_pool2d(F.conv2d(x, w), **geometry(options)), w).square().sum()

    before = EliminateCopies().run(capture_joint(loss, x, w, decompositions=select_decomp_table())).program
    names = targets(before)
    expand = "prims._low_memory_max_pool_offsets_to_indices.default"
    # Of the backward some versions of torch make an addition, and some leave it as it is.
    (reader,) = {"aten.scatter_add.default", "aten.max_pool2d_with_indices_backward.default"}.intersection(names)
    assert expand in names
    result = check(ShrinkIndices(), before, x, w)
    found = targets(result.program)
    if options in APART:
        assert expand not in found and reader not in found
        assert timeline(result.program).peak_bytes < timeline(before).peak_bytes
    else:
        assert found.index(reader) - found.index(expand) <= 3
        assert names.index(reader) - names.index(expand) > 3


def test_indices_that_others_read_stay():
    x = data(SHAPES[2])

    def returned(x):
        y, index = F.max_pool2d(x * 2, 2, return_indices=True)
        return y.sum(), index

    def unpooled(x):
        y, index = F.max_pool2d(x * 2, 2, return_indices=True)
        return F.max_unpool2d(y * 2, index, 2).sum()

    for function, reason in (
        (returned, "its indices are returned to the caller"),
        (unpooled, "reads its indices, and is"),
    ):
        program = capture_joint(function, x)
        result = check(ShrinkIndices(), program, x)
        assert result.program is program
        (found,) = reasons(result).values()
        assert reason in found


def test_pools_without_a_backward_are_left_alone():
    x, w = data(SHAPES[2]).detach(), torch.randn(3, 3, 1, 1, requires_grad=True)
    program = capture_joint(lambda x, w: F.conv2d(F.max_pool2d(x, 2), w).sum(), x, w)
    assert check(ShrinkIndices(), program, x, w).program is program


@pytest.mark.quick("unet")
@pytest.mark.parametrize("name", ["unet", "resnet18", "densenet121"])
def test_real_models_train_as_eager_does(name):
    torch._dynamo.reset()
    model, inputs = build(name)
    restore = restorer(model)
    loss = step(model, inputs)
    expected = gradients(model)
    restore()
    passes = tuple(item for item in memopt.TRAINING if item.name != "checkpoint" and not item.lowers_floor)
    compiled = memopt.compile(model, backend="aten", passes=(*passes[:-1], ShrinkIndices(), passes[-1]))
    torch.testing.assert_close(step(compiled, inputs), loss, rtol=0, atol=0)
    torch.testing.assert_close(gradients(model), expected, rtol=0, atol=0)
    (record,) = [record for record in compiled.report.passes if record.name == "shrink_indices"]
    assert record.changes and record.evidence.proved == record.evidence.regions


def test_each_pooling_is_proved_by_itself():
    x, w = data(SHAPES[2]), torch.randn(3, 3, 3, 3, requires_grad=True)

    def loss(x, w):
        for _ in range(2):
            x = F.max_pool2d(F.conv2d(x, w, padding=1), 3, 2, 1)
        return x.square().sum()

    before = capture_joint(loss, x, w)
    after = ShrinkIndices().run(before).program
    found = differing_regions(before, after)
    assert sorted(str(node.target) for region in found for node in region.before if "pool" in str(node.target)) == [
        *["aten.max_pool2d_with_indices.default"] * 2,
        *["aten.max_pool2d_with_indices_backward.default"] * 2,
    ]
    evidence = prove(before, after, 0.0, True)
    assert (evidence.regions, evidence.proved, evidence.unproved) == (2, 2, ())


def test_dropout_before_a_pool_passes_a_finite_difference_check():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Dropout(0.3), nn.MaxPool2d(2), nn.Flatten()).double()
    x = torch.randn(2, 1, 8, 8, dtype=torch.float64)
    passes = tuple(item for item in memopt.TRAINING if item.name != "checkpoint" and not item.lowers_floor)
    compiled = memopt.compile(model, backend="aten", passes=(*passes, ShrinkIndices()))

    def loss():
        torch.manual_seed(1)
        return compiled(x).square().sum()

    loss().backward()
    weight, gradient = model[0].weight, model[0].weight.grad.clone()
    direction = torch.randn_like(weight)
    with torch.no_grad():
        weight += 1e-6 * direction
    up = loss().detach()
    with torch.no_grad():
        weight -= 2e-6 * direction
    slope = (up - loss().detach()) / 2e-6
    torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unet", "densenet121"])
def test_real_models_train_on_inductor(name):
    torch._dynamo.reset()
    model, inputs = build(name)
    model.eval()  # no dropout: Inductor draws other masks than eager
    restore = restorer(model)
    loss = step(model, inputs)
    expected = gradients(model)
    restore()
    passes = tuple(item for item in memopt.TRAINING if item.name != "checkpoint" and not item.lowers_floor)
    compiled = memopt.compile(model, backend="inductor", passes=(*passes[:-1], ShrinkIndices(), passes[-1]))
    torch.testing.assert_close(step(compiled, inputs), loss, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients(model), expected, rtol=1e-3, atol=1e-4)
    (record,) = [record for record in compiled.report.passes if record.name == "shrink_indices"]
    assert record.changes
