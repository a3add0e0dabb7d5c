"""Operators that only some devices' graphs hold, as ONNX operators."""

import operator

import onnx
import onnx_ir as ir
import pytest
import torch
from torch import fx

import memopt
from memopt.convert.capture import Captured
from memopt.convert.emit import emit
from memopt.convert.verify import Runner
from memopt.onnx import OnnxPassManager
from memopt.onnx.passes.fuse_normalization import FuseNormalization
from memopt.passes import fuse_norm

aten = torch.ops.aten


def graph(sizes, weighted, eps, *read):
    """A graph of what CUDA runs a root-mean-square normalization by."""
    made = fx.Graph()
    x, weight = made.placeholder("x"), made.placeholder("weight")
    node = made.call_function(aten._fused_rms_norm.default, (x, sizes, weight if weighted else None, eps))
    made.output([made.call_function(operator.getitem, (node, index)) for index in read])
    return fx.GraphModule({}, made)


def emitted(module, x, weight, opset=20):
    exported = torch.export.export(module, (x, weight), strict=False)
    names = [f"output_{index}" for index in range(len(module(x, weight)))]
    return emit(Captured(exported, module, {}, {}, ()), names, opset)


@pytest.mark.quick("*-dtype0", "sizes1-False-0.5-dtype1", "sizes2-True-None-dtype2")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize(("sizes", "weighted", "eps"), [([8], True, 1e-6), ([5, 8], False, 0.5), ([8], True, None)])
def test_the_root_mean_square_normalization_of_cuda(dtype, sizes, weighted, eps):
    torch.manual_seed(0)
    x, weight = torch.randn(3, 5, 8).to(dtype), torch.randn(8).to(dtype)
    x[0, 0] = 1e-4  # where epsilon counts
    module = graph(sizes, weighted, eps, 0)
    model = emitted(module, x, weight)
    assert "CastLike" not in [node.op_type for node in model.graph]  # which newer exporters spell it out with
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    (found,) = Runner(proto.SerializeToString())({"x": x, "weight": weight})
    (expected,) = module(x, weight)
    assert found.dtype is dtype and found.shape == expected.shape
    torch.testing.assert_close(found, expected)


def test_its_reciprocal_root_is_a_result_too():
    x, weight = torch.randn(3, 5, 8), torch.randn(8)
    module = graph([8], True, 1e-6, 0, 1)
    for found, value in zip(
        Runner(ir.to_proto(emitted(module, x, weight)).SerializeToString())({"x": x, "weight": weight}),
        module(x, weight),
        strict=True,
    ):
        torch.testing.assert_close(found, value)


def test_it_is_a_form_that_the_passes_know():
    x, weight = torch.randn(3, 5, 8), torch.randn(8)
    fixed = graph([8], True, 1e-6, 0)
    exported = torch.export.export(Fixed(fixed, weight), (x,), strict=False)
    model = emit(Captured(exported, fixed, {}, {}, ()), ["output_0"], 23)
    rewritten, _ = OnnxPassManager([FuseNormalization()], verify=False).run(model)
    assert "RMSNormalization" in [node.op_type for node in rewritten.graph]


class Fixed(torch.nn.Module):
    def __init__(self, module, weight):
        super().__init__()
        self.module = module
        self.weight = torch.nn.Parameter(weight)

    def forward(self, x):
        return self.module(x, self.weight)


def test_a_model_whose_normalization_was_fused_runs_under_onnx_runtime(monkeypatch):
    # The CPU has no kernel for the operator, but can stand for a device that has one.
    monkeypatch.setattr(fuse_norm, "_has_kernel", lambda name, device: True)
    x, norm = torch.randn(3, 5, 8), torch.nn.RMSNorm(8, eps=1e-6)
    torch.nn.init.normal_(norm.weight)

    class Model(torch.nn.Module):
        def forward(self, x):
            return norm.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps))

    torch._dynamo.reset()
    compiled = memopt.compile(Model(), backend="onnxruntime")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), norm(x))
    changes = [change.summary for item in compiled.report.passes for change in item.changes]
    assert any("spells out RMSNorm" in change for change in changes)
