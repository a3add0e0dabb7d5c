import numpy as np
import onnx
import onnx_ir as ir

from memopt.onnx.infer import without_inferred
from memopt.onnx.load import prepare
from tests.onnx.build import model, weight

TEXT = (
    "(float[N,4] x, int64[1] k) => (float[N,6] y, float[M] z) "
    "{ a = MatMul(x, w) b = Relu(a) y = Neg(b) c = Reshape(x, k) z = Neg(c) }"
)


def annotated() -> ir.Model:
    return prepare(model(TEXT, {"w": weight(4, 6)}))


def test_shapes_that_are_found_again_are_left_out() -> None:
    given = annotated()
    found = ir.to_proto(without_inferred(given))
    assert len(ir.to_proto(given).graph.value_info) > 0 and list(found.graph.value_info) == []
    again = onnx.shape_inference.infer_shapes(found, data_prop=True)
    shapes = {
        info.name: [d.dim_param or d.dim_value for d in info.type.tensor_type.shape.dim]
        for info in again.graph.value_info
    }
    assert shapes["a"] == shapes["b"] == ["N", 6]
    assert {entry.name for entry in found.graph.output} == {"y", "z"}
    assert all(entry.type.tensor_type.elem_type == 1 for entry in found.graph.output)
    onnx.checker.check_model(found, full_check=True)


def test_what_inference_cannot_know_stays() -> None:
    given = annotated()
    value = next(node.outputs[0] for node in given.graph if node.op_type == "Reshape")
    value.shape = ir.Shape(["rows"])
    found = ir.to_proto(without_inferred(given))
    assert [info.name for info in found.graph.value_info] == [value.name]


def test_the_given_model_and_its_weights_stay() -> None:
    given = annotated()
    before = ir.to_proto(given).SerializeToString()
    found = without_inferred(given)
    assert ir.to_proto(given).SerializeToString() == before
    (weights,) = found.graph.initializers.values()
    assert weights.const_value is next(iter(given.graph.initializers.values())).const_value
    assert np.array_equal(onnx.numpy_helper.to_array(ir.to_proto(found).graph.initializer[0]), weight(4, 6))
