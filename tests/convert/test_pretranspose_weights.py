import numpy as np
import onnx_ir as ir
import pytest

from memopt.convert.pretranspose_weights import pretranspose_weights
from memopt.convert.verify import Runner
from tests.convert.onnx_models import sound


def model(extra=None, size=600):
    """y = relu(x @ w.T) with a weight of more than a mebibyte."""
    proto = sound()
    (weight,) = proto.graph.initializer
    values = np.random.default_rng(0).standard_normal((size, 500)).astype(np.float32)
    weight.dims[:] = values.shape
    weight.raw_data = values.tobytes()
    for value, width in ((proto.graph.input[0], 500), (proto.graph.output[0], size)):
        value.type.tensor_type.shape.dim[1].dim_value = width
    if extra:
        proto.graph.node.append(extra)
    return ir.from_proto(proto)


def run(model):
    import torch

    x = torch.ones(2, 500)
    return Runner(ir.to_proto(model).SerializeToString())({"x": x})[0]


def test_a_large_weight_is_turned_and_not_held_twice():
    given, turned = model(), model()
    assert pretranspose_weights(turned) == 1
    assert [node.op_type for node in turned.graph] == ["Identity", "MatMul", "Relu", "Sqrt"]
    (weight,) = turned.graph.initializers.values()
    assert (list(weight.shape), weight.name) == ([500, 600], "w_turned")
    assert isinstance(weight.const_value, ir.LazyTensor)
    assert (run(turned) == run(given)).all()


@pytest.mark.parametrize("case", ["small", "read by another", "two orders", "output"])
def test_other_weights_stay(case):
    extra = None
    if case == "read by another":
        extra = ir.to_proto(ir.node("Sqrt", [ir.Value(name="w")], outputs=[ir.Value(name="other")]))
    if case == "two orders":
        extra = ir.to_proto(ir.node("Transpose", [ir.Value(name="w")], {"perm": [0, 1]}, outputs=[ir.Value(name="o")]))
    given = model(extra, 100 if case == "small" else 600)
    if case == "output":
        turned = next(node for node in given.graph if node.op_type == "Transpose")
        given.graph.outputs.append(turned.outputs[0])
    before = str(given)
    assert pretranspose_weights(given) == 0
    assert str(given) == before
