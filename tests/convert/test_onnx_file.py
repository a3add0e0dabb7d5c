import os

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from memopt.convert.errors import ConversionError
from memopt.convert.onnx_file import external_files, read_onnx, size_of
from tests.convert.onnx_models import external, saved, sound


def test_a_sound_model(tmp_path):
    path = saved(tmp_path, sound())
    assert read_onnx(path).graph.initializers["w"].const_value.numpy()[0, 0] == 2
    assert external_files(path) == set()
    assert size_of(path) == path.stat().st_size


def test_weights_beside_are_mapped(tmp_path):
    path = external(tmp_path)
    assert read_onnx(path).graph.initializers["w"].const_value.numpy()[31, 3] == 2
    assert external_files(path) == {"w.bin"}
    assert size_of(path) == path.stat().st_size + 512
    assert read_onnx(external(tmp_path, offset=0, length=512)).graph


@pytest.mark.parametrize(
    "location", ["../w.bin", "/etc/hostname", "a/../../w.bin", "..\\w.bin", "C:\\w.bin", "", "sub/../../w", "w\0.bin"]
)
def test_weights_outside_the_folder_are_refused(tmp_path, location):
    (tmp_path / "model").mkdir()
    (tmp_path / "w.bin").write_bytes(bytes(512))
    model = sound()
    (tensor,) = model.graph.initializer
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    with pytest.raises(ConversionError, match=r"outside its folder|without a name") as caught:
        read_onnx(saved(tmp_path / "model", model))
    assert "\n" not in str(caught.value)


def test_links_that_leave_the_folder_are_refused(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "secret").write_bytes(bytes(512))
    os.symlink(tmp_path / "secret", tmp_path / "model" / "link.bin")
    os.symlink(tmp_path, tmp_path / "model" / "up")
    for location in ("link.bin", "up/secret"):
        model = sound()
        (tensor,) = model.graph.initializer
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=location)
        with pytest.raises(ConversionError, match="outside its folder"):
            read_onnx(saved(tmp_path / "model", model))


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"offset": 8}, "end after w.bin does"),
        ({"offset": -8}, "begin before w.bin does"),
        ({"length": 64}, "take 512 bytes, but the file says 64"),
        ({"length": 2**62}, "but the file says"),
        ({"offset": "many"}, "no readable place"),
    ],
)
def test_places_that_are_not_there(tmp_path, places, message):
    with pytest.raises(ConversionError, match=message):
        read_onnx(external(tmp_path, **places))


def test_weights_that_are_missing(tmp_path):
    path = external(tmp_path)
    os.unlink(tmp_path / "w.bin")
    with pytest.raises(ConversionError, match=r"w.bin, which does not exist"):
        read_onnx(path)
    (tmp_path / "w.bin").mkdir()
    with pytest.raises(ConversionError, match=r"which does not exist"):
        read_onnx(path)


def shorter(tensor):
    tensor.raw_data = tensor.raw_data[:-1]


def huge(tensor):
    tensor.dims[0] = 2**40


def negative(tensor):
    tensor.dims[0] = -32


def empty(tensor):
    tensor.ClearField("raw_data")


def unknown(tensor):
    tensor.data_type = 99


def untyped(tensor):
    tensor.data_type = 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shorter, "takes 512 bytes, but 511 are there"),
        (huge, r"takes \d+ bytes, but 512 are there"),
        (negative, "has a negative size"),
        (empty, "has 128 values, but none is there"),
        (unknown, "is of an unknown type"),
        (untyped, "is of an unknown type"),
    ],
)
@pytest.mark.parametrize("place", ["weight", "attribute", "subgraph"])
def test_tensors_that_lie(tmp_path, change, message, place):
    model = sound()
    (tensor,) = model.graph.initializer
    change(tensor)
    if place != "weight":
        node = onnx.helper.make_node("Constant", [], ["c"], value=onnx.numpy_helper.from_array(np.zeros(1)))
        node.attribute[0].t.CopyFrom(tensor)
        del model.graph.initializer[:]
        if place == "subgraph":
            inner = onnx.helper.make_graph([node], "inner", [], [])
            node = onnx.helper.make_node("If", ["x"], ["c"], then_branch=inner, else_branch=inner)
        model.graph.node.insert(0, node)
    with pytest.raises(ConversionError, match=message):
        read_onnx(saved(tmp_path, model))


@pytest.mark.parametrize(
    "content", [b"", b"\x08\x0a", b"junk that is no protobuf", b"PK\x03\x04" + bytes(100), b"\xff" * 1000]
)
def test_files_that_are_no_models(tmp_path, content):
    (tmp_path / "in.onnx").write_bytes(content)
    with pytest.raises(ConversionError, match=r"in.onnx is no ONNX model") as caught:
        read_onnx(tmp_path / "in.onnx")
    assert "\n" not in str(caught.value)


def test_every_cut_is_noticed(tmp_path):
    whole = sound().SerializeToString()
    for keep in range(0, len(whole), 37):
        (tmp_path / "in.onnx").write_bytes(whole[:keep])
        with pytest.raises(ConversionError):
            read_onnx(tmp_path / "in.onnx")


def test_training_information_is_refused(tmp_path):
    model = sound()
    model.training_info.add()
    with pytest.raises(ConversionError, match="training information"):
        read_onnx(saved(tmp_path, model))
