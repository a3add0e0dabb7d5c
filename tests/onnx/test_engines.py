import pytest

np = pytest.importorskip("numpy")
ir = pytest.importorskip("onnx_ir")

from memopt.onnx.engines import with_weights_beside  # noqa: E402


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "bfloat16"])
def test_large_weights_that_were_read_from_a_file_are_handed_over(dtype):
    """What is read from a file has a type with an order of bytes, which numpy does not count as built in."""
    kind = getattr(ir.DataType, {"float32": "FLOAT", "float16": "FLOAT16", "int64": "INT64"}.get(dtype, "BFLOAT16"))
    array = (np.arange(1 << 20) % 1000).reshape(1024, 1024).astype(kind.numpy())
    if dtype != "bfloat16":
        array = array.view(array.dtype.newbyteorder("<"))
    weight = ir.Value(name="w", const_value=ir.Tensor(array, dtype=kind), shape=ir.Shape([1024, 1024]))
    weight.type = ir.TensorType(kind)
    node = ir.node("Identity", [weight])
    node.outputs[0].name = "y"
    node.outputs[0].type, node.outputs[0].shape = weight.type, weight.shape
    graph = ir.Graph([], [node.outputs[0]], nodes=[node], initializers=[weight], opset_imports={"": 20}, name="g")
    proto, weights = with_weights_beside(ir.Model(graph, ir_version=10))
    assert list(weights) == ["w"] and not proto.graph.initializer[0].raw_data
    assert list(weights["w"].shape()) == [1024, 1024]
    if dtype != "bfloat16":
        np.testing.assert_array_equal(weights["w"].numpy(), array)
