"""Small ONNX models, sound and broken."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def sound(rows: int | str = "rows", value: float = 2.0) -> onnx.ModelProto:
    """y = Identity(x) * w + w, with a constant that can be folded and a node that nothing reads."""
    weight = numpy_helper.from_array(np.full((32, 4), value, np.float32), "w")
    nodes = [
        helper.make_node("Identity", ["x"], ["same"], name="copy"),
        helper.make_node("Transpose", ["w"], ["turned"], name="turn"),
        helper.make_node("MatMul", ["same", "turned"], ["product"], name="product"),
        helper.make_node("Relu", ["product"], ["y"], name="relu"),
        helper.make_node("Sqrt", ["product"], ["unread"], name="unread"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [rows, 32])],
        [weight],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def saved(folder: Path, model: onnx.ModelProto, name: str = "in.onnx") -> Path:
    (folder / name).write_bytes(model.SerializeToString())
    return folder / name


def external(folder: Path, location: str = "w.bin", name: str = "in.onnx", **places: int) -> Path:
    """The sound model with its weights in a file; `places` are offset and length."""
    model = sound()
    (tensor,) = model.graph.initializer
    data = tensor.raw_data
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    for key, value in places.items():
        tensor.external_data.add(key=key, value=str(value))
    if "/" not in location and "\\" not in location and location not in ("", "."):
        (folder / location).write_bytes(data)
    return saved(folder, model, name)
