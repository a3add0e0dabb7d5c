"""ONNX files that verbs read: a model as passes take it, or one line."""

import sys

import onnx
import pytest

from memopt.cli.group import FAILED, USAGE, CommandError
from memopt.cli.onnx_source import load_onnx
from tests.onnx.build import model


def test_a_model_is_read_and_its_nodes_have_names(tmp_path):
    onnx.save(model("(float[N,3] x) => (float[N,3] y) { a = Relu(x) y = Neg(a) }"), tmp_path / "m.onnx")
    found = load_onnx(tmp_path / "m.onnx")
    assert [node.op_type for node in found.graph] == ["Relu", "Neg"] and all(node.name for node in found.graph)


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        (None, USAGE, "no file "),
        (b"", FAILED, ""),
        (b"junk", FAILED, "is no ONNX file"),
        (model("(float[3] x) => (float[3] y) { y = Nothing(x) }").SerializeToString(), FAILED, "Nothing"),
    ],
    ids=["missing", "empty", "junk", "invalid"],
)
def test_what_cannot_be_read_is_named(tmp_path, content, code, message):
    path = tmp_path / "m.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CommandError) as caught:
        load_onnx(path)
    assert caught.value.exit_code == code and message in caught.value.message and str(path) in caught.value.message


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(CommandError, match="no file"):
        load_onnx(tmp_path)


def test_without_the_packages_the_extra_is_named(tmp_path, monkeypatch):
    (tmp_path / "m.onnx").write_bytes(b"junk")
    monkeypatch.setitem(sys.modules, "onnx_ir", None)
    with pytest.raises(CommandError, match=r"pip install memopt\[onnx\]"):
        load_onnx(tmp_path / "m.onnx")
