"""A U-Net in parts of its batch: the least peak, plans and budgets."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

import memopt
from memopt.memory.cost.table import CostTable
from memopt.memory.measure import measure
from memopt.memory.timeline import timeline
from memopt.pass_manager import PassManager
from memopt.passes.checkpoint import Checkpoint
from memopt.passes.split_batch import SplitBatch
from tests.end_to_end import gradients, resident_bytes, restorer, step
from tests.passes.build import capture_joint
from tests.passes.test_split_batch import results


def unet(batch=4, resolution=64):
    torch.manual_seed(0)
    model = memopt.models.build("unet", tiny=True).train()
    return model, model.example_inputs(batch, labels=True, resolution=resolution)


def test_the_least_peak_of_a_unet_falls_and_plans_keep_it():
    model, inputs = unet()
    names, parameters = zip(*model.named_parameters(), strict=True)

    def loss(images, labels, *weights):
        return functional_call(model, dict(zip(names, weights, strict=True)), (images, labels))

    tensors = [inputs["images"], inputs["labels"], *parameters]
    program = capture_joint(loss, *tensors)
    costs = CostTable(limit_bytes=0).measure_all(program)
    line = timeline(program)
    with pytest.raises(ValueError, match="the least peak is"):
        Checkpoint(line.peak_bytes * 45 // 100, costs=costs, seconds=1.0).run(program)
    manager = PassManager([SplitBatch(2, least_bytes=1), Checkpoint(line.peak_bytes * 45 // 100, seconds=1.0)])
    after, records = manager.run(program)
    assert records[0].evidence.proved == records[0].evidence.regions > 0
    assert timeline(after).peak_bytes <= line.peak_bytes * 45 // 100
    torch.testing.assert_close(results(after, tensors), results(program, tensors), rtol=1e-3, atol=1e-5)


def always(parts):
    """Passes of a step that is not planned, with the split."""
    passes = tuple(item for item in memopt.TRAINING if item.name != "checkpoint" and not item.lowers_floor)
    return (*passes[:-1], SplitBatch(parts, least_bytes=1), passes[-1])


@pytest.mark.parametrize("backend", ["aten", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_unet_trains_as_eager_does_in_the_bytes_that_were_predicted(backend):
    torch._dynamo.reset()
    model, inputs = unet()
    for module in model.modules():
        if isinstance(module, nn.Dropout) and backend == "inductor":
            module.p = 0.0  # Inductor draws other masks than eager
    restore = restorer(model)
    loss = step(model, inputs)
    expected = gradients(model)
    restore()
    compiled = memopt.compile(model, backend=backend, passes=always(3))
    torch.testing.assert_close(step(compiled, inputs), loss, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients(model), expected, rtol=1e-3, atol=1e-4)
    (record,) = [record for record in compiled.report.passes if record.name == "split_batch"]
    assert record.changes and record.evidence.proved == record.evidence.regions
    model.zero_grad()
    step(compiled, inputs)
    model.zero_grad()
    taken = measure(lambda: step(compiled, inputs)).peak_bytes + resident_bytes(model, inputs)
    if backend == "aten":
        assert taken == compiled.report.peak_bytes


@pytest.mark.slow
def test_a_budget_that_nothing_else_keeps_and_the_least_that_is_named():
    model, inputs = unet(8)

    def compiled_within(budget, passes):
        torch._dynamo.reset()
        return memopt.compile(model, budget, backend="aten", passes=passes, example_inputs=inputs)

    *before, checkpoint, inplace = [item for item in memopt.TRAINING if item.name != "split_batch"]
    passes = (*before, SplitBatch(4, least_bytes=1), checkpoint, inplace)
    least = []
    for tried in ((*before, checkpoint, inplace), passes):
        with pytest.raises(memopt.BudgetError) as refused:
            compiled_within(1, tried)
        least.append(refused.value.minimum_bytes)
    assert least[1] < 0.75 * least[0]
    for budget in (int(0.85 * least[0]), int(1.02 * least[1])):
        compiled = compiled_within(budget, passes)
        step(compiled, inputs)
        model.zero_grad()
        taken = measure(lambda: step(compiled, inputs)).peak_bytes + resident_bytes(model, inputs)  # noqa: B023
        assert taken == compiled.report.peak_bytes <= budget
        model.zero_grad()
