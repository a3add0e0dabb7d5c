"""Nothing is lost by rewriting the exported graph and not the Program: both come to the same weights and operators."""

import numpy as np
import onnx
import pytest
import torch

import memopt
from memopt import models
from memopt.capture.export import from_module
from memopt.convert.rewriting import COUNTERPARTS, TARGETS
from memopt.passes.fuse_conv_bn import FuseConvBn
from memopt.program import InputKind


def test_every_pass_of_inference_has_its_counterpart():
    assert set(COUNTERPARTS) == {item.name for item in memopt.INFERENCE}
    known = {item.name for passes in TARGETS.values() for item in passes}
    assert {name for names in COUNTERPARTS.values() for name in names} <= known
    assert [name for name, there in COUNTERPARTS.items() if not there] == ["read_parts", "inplace"]


def shifted(name):
    """The model with batch statistics as training leaves them: the ones it starts with would hide mistakes."""
    torch.manual_seed(0)
    model = models.build(f"{name}:tiny").eval()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            for value in (module.running_mean, module.bias.data):
                value.normal_()
            for value in (module.running_var, module.weight.data):
                value.uniform_(0.5, 2.0)
    return model


@pytest.mark.quick("resnet18")
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_large"])
def test_batch_norms_are_folded_into_the_same_weights_bit_by_bit(tmp_path, name):
    model = shifted(name)
    inputs = model.example_inputs(2)
    program = from_module(model, (), inputs)
    folded = FuseConvBn().run(program)
    constants = [entry.name for entry in folded.program.inputs if entry.kind is InputKind.CONSTANT]
    ours = [folded.program.state[name].detach().numpy() for name in constants]
    record = memopt.export(model, inputs, tmp_path / "m.onnx")
    file = onnx.load(tmp_path / "m.onnx")
    theirs = [onnx.numpy_helper.to_array(value) for value in file.graph.initializer]
    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    assert len(folded.changes) == len(norms) > 10
    assert "BatchNormalization" not in record.nodes_after
    for array in ours:
        assert any(array.shape == other.shape and np.array_equal(array, other) for other in theirs), array.shape
