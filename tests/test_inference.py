"""Inference: outputs and peaks of the reference models beside eager PyTorch, and weights that change afterwards."""

import gc

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import memopt
from memopt.compilation.session import Session
from tests.end_to_end import build, cases, in_dtype, resident_bytes

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def floats(out):
    """The floating-point tensors of a model's output."""
    if hasattr(out, "to_tuple"):
        out = out.to_tuple()
    return [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def warm_up_statistics(model):
    """Running statistics and affine parameters that make folding a batch norm do something."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            for tensor, low in ((module.running_mean, -0.5), (module.running_var, 0.5), (module.weight, 0.5)):
                nn.init.uniform_(tensor, low, low + 1)


def held_bytes():
    """Bytes of the distinct storages of all real CPU tensors that Python can reach."""
    found = {}
    for item in gc.get_objects():
        if type(item) in (torch.Tensor, nn.Parameter) and item.device.type == "cpu" and not item.is_sparse:
            storage = item.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


@pytest.mark.quick("unet", "gpt2")
@pytest.mark.parametrize("name", cases(("resnet18", "unet", "vit_b_16", "gpt2", "llama_tiny", "hf_bert", "hf_t5")))
def test_outputs_equal_eager_s_and_the_peak_is_predicted(name):
    model, inputs = build(name, labels=False)
    warm_up_statistics(model)
    model.eval()
    compiled = memopt.compile(model, backend="aten")
    with torch.no_grad():
        expected, found = floats(model(**inputs)), floats(compiled(**inputs))
        measurement = memopt.measure(lambda: compiled(**inputs), device="cpu")
        report = compiled.report
        model.double()
        exact = floats(model(**in_dtype(inputs, torch.float64)))
        torch._dynamo.reset()
        doubled = floats(memopt.compile(model, backend="aten", verify=False)(**in_dtype(inputs, torch.float64)))
        model.float()
    for eager, value, double, reference in zip(expected, found, doubled, exact, strict=True):
        scale = float(reference.abs().max())
        assert float((double - reference).abs().max()) <= 1e-10 * scale
        allowed = 2 * float((eager - reference).abs().max()) + 4 * torch.finfo(torch.float32).eps * scale
        assert (value.dtype, value.shape, value.stride()) == (eager.dtype, eager.shape, eager.stride())
        assert float((value - reference).abs().max()) <= allowed
    folded = report.breakdown.buffers - sum(b.numel() * b.element_size() for b in unique(model.buffers()))
    measured = resident_bytes(model, inputs) + folded + measurement.peak_bytes
    assert report.peak_bytes == pytest.approx(measured, rel=0.02)
    assert report.peak_bytes == report.breakdown.total


def unique(tensors):
    return list({tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}.values())


def test_folded_weights_are_counted_as_resident():
    model, inputs = build("resnet18", labels=False)
    model.eval()
    with torch.no_grad():
        compiled = memopt.compile(model, backend="aten")
        gc.collect()
        before = held_bytes()
        out = compiled(**inputs)
        gc.collect()
        grown = held_bytes() - before - out.numel() * out.element_size()
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    assert compiled.report.breakdown.buffers - buffers == pytest.approx(grown, rel=0.02)


@pytest.mark.quick("resnet18")
@pytest.mark.parametrize("name", ["resnet18", "hf_gpt2"])
def test_an_inference_budget_is_kept_or_refused(name):
    model, inputs = build(name, labels=False)
    model.eval()
    with torch.no_grad():
        report = memopt.plan(model, inputs)
        compiled = memopt.compile(model, report.peak_bytes, backend="aten")
        compiled(**inputs)
        assert max(compiled.report.peak_bytes, compiled.report.measured_peak_bytes) <= report.peak_bytes
        torch._dynamo.reset()
        with pytest.raises(memopt.BudgetError) as caught:
            memopt.compile(model, "1kB", backend="aten")(**inputs)
        torch._dynamo.reset()
        least = caught.value.minimum_bytes  # in chunks of the batch
        assert least < report.peak_bytes
        compiled = memopt.compile(model, least, backend="aten")
        compiled(**inputs)
        assert max(compiled.report.peak_bytes, compiled.report.measured_peak_bytes) <= least


class Folds(nn.Module):
    """A convolution that takes in its batch norm, and an expression of weights that is folded."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.scale = nn.Parameter(torch.rand(4, 4))

    def forward(self, x):
        y = self.norm(self.conv(x)).relu()
        return y.mean((2, 3)) @ (self.scale * 2).t().exp()


def close(compiled, model, x):
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-12, atol=1e-12)


def test_weights_that_change_in_place_are_folded_anew():
    model = Folds().double().eval()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    compiled = memopt.compile(model, backend="aten")
    close(compiled, model, x)
    assert any(record.name == "fuse_conv_bn" and record.changes for record in compiled.report.passes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(x).sum().backward()
    optimizer.step()
    close(compiled, model, x)
    other = Folds().double()
    warm_up_statistics(other)
    compiled.load_state_dict(other.state_dict())
    close(compiled, other.eval(), x)
    with torch.no_grad():
        model.norm.running_mean.add_(1.0)
    close(compiled, model, x)
    model.conv.weight.data = torch.randn_like(model.conv.weight)
    close(compiled, model, x)


@pytest.mark.quick("aten")
@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_weights_that_are_trained_are_folded_no_more(backend, monkeypatch):
    """Else each evaluation of a training run would begin with the passes."""
    model, x, planned = Folds().double().eval(), torch.randn(2, 3, 8, 8, dtype=torch.float64), []
    inference = Session.inference
    monkeypatch.setattr(Session, "inference", lambda self, program: planned.append(1) or inference(self, program))
    compiled = memopt.compile(model, budget="1GB", backend=backend)
    counts = []
    for _ in range(6):
        close(compiled, model, x)
        close(compiled, model, x)
        counts.append(len(planned))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
            model.norm.running_var.add_(0.1)
    assert counts[1] > counts[0] and counts[3:] == [counts[3]] * 3
    if backend == "aten":  # Inductor's report stays that of the first plan
        assert not any(record.name == "fuse_conv_bn" and record.changes for record in compiled.report.passes)


def test_folding_anew_does_not_hold_on_to_the_old_weights():
    model = Folds().eval()
    x = torch.randn(2, 3, 8, 8)
    compiled = memopt.compile(model, backend="aten")
    held = []
    with torch.no_grad():
        for _ in range(4):
            model.conv.weight.mul_(1.5)
            compiled(x)
            gc.collect()
            held.append(held_bytes())
    assert held[2] == held[1] and held[3] <= held[2]  # trained by then: nothing is folded any more


def test_train_eval_train():
    model, twin = Folds().double(), Folds().double()
    twin.load_state_dict(model.state_dict())
    compiled = memopt.compile(model, backend="aten")
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
    for training in (True, False, True, False):
        compiled.train(training)
        twin.train(training)
        assert model.training == compiled.training == training == model.norm.training
        for run, optimizer in zip((compiled, twin), optimizers, strict=True):
            optimizer.zero_grad()
            run(x).sum().backward()
            optimizer.step()
        torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-12, atol=1e-12)
        close(compiled, twin, x)
        # In training mode that call moved the running statistics of both.
        torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_without_gradients(guard):
    model = Folds().double().eval()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    compiled = memopt.compile(model, backend="aten")
    with guard():
        found, expected = compiled(x), model(x)
    assert found.requires_grad == expected.requires_grad
    assert found.is_inference() == expected.is_inference()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    # The same module afterwards with gradients, and without again.
    compiled(x).sum().backward()
    grad = model.conv.weight.grad.clone()
    model.zero_grad()
    model(x).sum().backward()
    torch.testing.assert_close(grad, model.conv.weight.grad, rtol=1e-12, atol=1e-12)
    close(compiled, model, x)


def test_a_new_batch_size_is_planned_anew():
    model = Folds().double().eval()
    compiled = memopt.compile(model, backend="aten")
    peaks = []
    for batch in (1, 2, 5, 2):
        close(compiled, model, torch.randn(batch, 3, 8, 8, dtype=torch.float64))
        peaks.append(compiled.report.peak_bytes)
    assert peaks[0] < peaks[1] < peaks[2]
    compiled.train()
    compiled(torch.randn(3, 3, 8, 8, dtype=torch.float64)).sum().backward()
    assert compiled.report.programs[0].kind == "training"
