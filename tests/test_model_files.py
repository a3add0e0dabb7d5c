"""A model as a file: what is refused before anything is converted, and what is written."""

import sys

import onnx
import pytest
import torch
from torch import nn

import memopt
from tests.onnx.build import model as built
from tests.support import in_one_line


def test_a_file_that_exists_is_kept_unless_told_otherwise(tmp_path):
    path = tmp_path / "m.onnx"
    path.write_text("mine")
    in_one_line(FileExistsError, "exists", memopt.export, nn.ReLU(), torch.ones(2, 3), path)
    assert path.read_text() == "mine"
    memopt.export(nn.ReLU(), torch.ones(2, 3), path, overwrite=True, measure=False)
    assert [node.op_type for node in onnx.load(path).graph.node] == ["Relu"]


@pytest.mark.parametrize(
    ("inputs", "options", "error", "match"),
    [
        (None, {}, TypeError, "a module needs example inputs"),
        (torch.ones(2, 3), {"opset": 3}, ValueError, "opset"),
        (torch.ones(2, 3), {"dtype": "fp8"}, ValueError, "dtype"),
        (torch.ones(2, 3), {"dynamic": "x:9"}, ValueError, "no input x"),
        (torch.ones(2, 3), {"dynamic": "9x"}, ValueError, "is no axis"),
        (torch.ones(2, 3), {"passes": ["fuse_nothing"]}, ValueError, "fuse_nothing"),
        ((torch.ones(2, 3), torch.ones(2, 3)), {}, TypeError, "too many positional arguments"),
    ],
)
def test_a_conversion_that_cannot_be_made(inputs, options, error, match):
    in_one_line(error, match, memopt.export, nn.ReLU(), inputs, None, **options)


def test_an_onnx_file_has_inputs_by_name_and_shapes_of_its_own(tmp_path):
    path = tmp_path / "in.onnx"
    onnx.save(built("(float[2,3] x) => (float[2,3] y) { a = Identity(x) y = Relu(a) }"), path)
    in_one_line(TypeError, "go by their names", memopt.export, path, torch.ones(2, 3), None)
    in_one_line(ValueError, "has shapes of its own", memopt.export, str(path), None, None, dynamic="batch")
    record = memopt.export(path, {"x": torch.ones(2, 3).numpy()}, tmp_path / "out.onnx", measure=False)
    assert record.runs and [node.op_type for node in onnx.load(tmp_path / "out.onnx").graph.node] == ["Relu"]


@pytest.mark.parametrize(
    ("call", "module", "extra"),
    [
        (memopt.export, "memopt.convert.pipeline", "onnx"),
        (memopt.export_tensorflow, "memopt.tensorflow.export", "tens"),
    ],
)
def test_a_missing_extra_is_named(monkeypatch, call, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    in_one_line(ImportError, rf"pip install memopt\[{extra}", call, nn.ReLU(), torch.ones(2), None)
