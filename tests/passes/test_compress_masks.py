"""CompressMasks: the same bits from an eighth of the bytes, whatever the layout, and what is left alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode

import memopt
from memopt.memory.timeline import timeline
from memopt.passes.compress_masks import CompressMasks
from memopt.passes.eliminate_copies import EliminateCopies
from memopt.program import Phase
from tests.end_to_end import build, gradients, restorer, step
from tests.passes.build import capture_joint, check, reasons
from tests.support import targets


def saved(program):
    """Dtype and elements of each value that crosses from forward to backward."""
    return sorted(
        (str(node.meta["val"].dtype).removeprefix("torch."), node.meta["val"].numel())
        for node in program.calls
        if node.meta["phase"] is Phase.FORWARD
        and isinstance(node.meta["val"], torch.Tensor)
        and any(user.meta.get("phase") is Phase.BACKWARD for user in node.users)
    )


def data(*shape, memory_format=torch.contiguous_format, dtype=torch.float32):
    torch.manual_seed(0)
    x = torch.randn(*shape).to(dtype)
    x.view(-1)[3], x.view(-1)[4] = float("nan"), -0.0
    return x.contiguous(memory_format=memory_format).requires_grad_()


@pytest.mark.parametrize("shape", [(4, 16, 32), (1030,), (37, 41), (2, 3, 5, 7, 11)], ids=str)
def test_dropout_masks(shape):
    x = data(*shape)
    before = capture_joint(lambda x: F.dropout(x, 0.3).sum(), x)
    result = check(CompressMasks(), before, x)
    (change,) = result.changes
    assert change.summary == "getitem_1 saved as bits"
    elements = x.numel()
    assert saved(before) == [("bool", elements)]
    assert saved(result.program) == [("uint8", -(-elements // 8))]
    assert timeline(result.program).saved_bytes - 4 == -(-elements // 8)


def test_a_mask_with_the_channels_last():
    x = data(2, 8, 9, 11, memory_format=torch.channels_last)
    before = capture_joint(lambda x: F.dropout(x, 0.3).sum(), x)
    result = check(CompressMasks(), before, x)
    assert saved(result.program) == [("uint8", 198)]


def test_a_mask_that_is_read_twice_is_taken_apart_twice():
    x = data(64, 32)

    def loss(x):
        mask = torch.bernoulli(torch.full_like(x, 0.5)) > 0.5
        return (torch.where(mask, x, 0.0) * 2).sum() + torch.where(mask, 0.0, x).square().sum()

    result = check(CompressMasks(), capture_joint(loss, x), x)
    assert len(result.changes) == 1
    assert targets(result.program).count("aten.bitwise_and.Tensor") == 2
    assert ("bool", 2048) not in saved(result.program)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", [None, "decomposed"])
def test_a_rectifier_s_result_that_backward_only_compares(form, dtype):
    x = data(32, 64, dtype=dtype)
    table = select_decomp_table() if form else None
    before = (
        EliminateCopies().run(capture_joint(lambda x: F.relu(x * 2).float().sum(), x, decompositions=table)).program
    )
    result = check(CompressMasks(), before, x)
    (change,) = result.changes
    assert change.summary.endswith("saved as one bit an element")
    assert (str(dtype).removeprefix("torch."), 2048) in saved(before)
    assert saved(result.program) == [("uint8", 256)]


def test_a_rectified_value_that_is_saved_anyway_is_left_alone():
    x, w = data(32, 64), torch.randn(64, 64, requires_grad=True)
    program = capture_joint(lambda x, w: (F.relu(x * 2) @ w).square().sum(), x, w)
    result = check(CompressMasks(), program, x, w)
    assert result.program is program and result.refusals == ()


def inductor_s_dropout(dtype):
    """A linear layer and dropout as Inductor spells it; in half precision numbers are cast before they are compared."""
    x = data(32, 64).to(dtype)
    captured = []

    class Grab(memopt.Pass):
        name = "grab"

        def run(self, program):
            captured.append(program)
            return memopt.PassResult(program)

    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.3)).to(dtype)
    compiled = memopt.compile(model, backend="inductor", passes=(Grab(),), verify=False)
    compiled._memopt.plan((x.detach(),), {})
    return captured[0]


# Inductor's code generator imports modules of torch that still use it.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductor_s_dropout(dtype):
    before = inductor_s_dropout(dtype)
    result = CompressMasks().run(before)
    result.program.check()
    assert ("bool", 2048) in saved(before)
    assert ("bool", 2048) not in saved(result.program) and ("uint8", 256) in saved(result.program)


def test_on_a_gpu_masks_that_have_a_seed_are_left_to_the_plan():
    before = inductor_s_dropout(torch.float32).copy()
    with FakeTensorMode():
        for node in before.calls:
            value = node.meta["val"]
            if isinstance(value, torch.Tensor):
                node.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
    result = CompressMasks().run(before)
    assert result.program is before
    assert reasons(result) == {"gt": "to draw it again from its seed takes less time than its bits"}


def test_what_reaches_the_caller_or_is_small_stays():
    x = data(32, 64)

    def returned(x):
        y, mask = torch.native_dropout(x, 0.3, True)
        return y.sum(), mask

    program = capture_joint(returned, x)
    result = check(CompressMasks(), program, x)
    assert result.program is program
    assert reasons(result) == {"getitem_1": "its memory reaches the caller, and is kept anyway"}
    small = data(31, 33)
    program = capture_joint(lambda x: F.dropout(x, 0.3).sum(), small)
    assert check(CompressMasks(), program, small).program is program


def without_floor():
    return tuple(item for item in memopt.TRAINING if item.name != "checkpoint" and not item.lowers_floor)


@pytest.mark.quick("unet")
@pytest.mark.parametrize("name", ["gpt2", "bert_base", "unet", pytest.param("hf_t5", marks=pytest.mark.slow)])
def test_real_models_train_as_eager_does(name):
    torch._dynamo.reset()
    model, inputs = build(name)
    restore = restorer(model)
    loss = step(model, inputs)
    expected = gradients(model)
    restore()
    passes = without_floor()
    compiled = memopt.compile(model, backend="aten", passes=(*passes[:-1], CompressMasks(), passes[-1]))
    torch.testing.assert_close(step(compiled, inputs), loss, rtol=0, atol=0)
    torch.testing.assert_close(gradients(model), expected, rtol=0, atol=0)
    (record,) = [record for record in compiled.report.passes if record.name == "compress_masks"]
    assert record.changes and record.evidence.proved > 0


def test_dropout_passes_a_finite_difference_check():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.3), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 1)).double()
    x = torch.randn(64, 32, dtype=torch.float64)
    compiled = memopt.compile(model, backend="aten", passes=(*without_floor(), CompressMasks()))

    def loss():
        torch.manual_seed(1)
        return compiled(x).square().sum()

    loss().backward()
    (record,) = [record for record in compiled.report.passes if record.name == "compress_masks"]
    assert len(record.changes) == 2
    for parameter in model.parameters():
        gradient, direction = parameter.grad.clone(), torch.randn_like(parameter)
        ends = []
        for size in (1e-6, -2e-6):
            with torch.no_grad():
                parameter += size * direction
            ends.append(loss().detach())
        with torch.no_grad():
            parameter += 1e-6 * direction
        torch.testing.assert_close((gradient * direction).sum(), (ends[0] - ends[1]) / 2e-6, rtol=1e-5, atol=1e-5)
