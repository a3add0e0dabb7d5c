import json
import os

import pytest

from tests.cli.conftest import assert_one_line, left_in
from tests.tensorflow.support import TRANSFORMER, needs_keras, needs_tensorflow, script

pytest.importorskip("onnx")
pytest.importorskip("jax")
pytestmark = needs_tensorflow


def test_a_model_becomes_a_saved_model(run, folder):
    result = run("convert", "vit_b_16:tiny", "--to", "tensorflow", "-o", "saved", "--format", "json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert [run["sizes"] for run in record["runs"]] == [{"batch": 2}, {"batch": 1}, {"batch": 4}]
    assert record["inputs"][0]["shape"][0] is None
    assert sorted(os.listdir("saved")) == ["assets", "fingerprint.pb", "saved_model.pb", "variables"]
    assert_one_line(run("convert", "vit_b_16:tiny", "--to", "tensorflow", "-o", "saved"), 2, "saved exists")


@needs_keras
def test_a_keras_file_becomes_a_saved_model_of_xla(run, folder):
    script(folder, TRANSFORMER + "import keras\nkeras.Model(*transformer(keras.layers)).save('m.keras')")
    result = run("convert", "m.keras", "--to", "tensorflow", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "tokens int32[batch, 12]" in result.stdout and "equal to the source in 3 runs" in result.stdout
    assert left_in(".") == ["factories.py", "m.keras"]


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (("vit_b_16:tiny", "--opset", "18"), 2, "--opset goes with ONNX files"),
        (("vit_b_16:tiny", "--dynamic", "height"), 2, "a SavedModel's batch can vary, or none"),
        (("model.onnx",), 2, "an ONNX file cannot become a SavedModel"),
        (("vit_b_17",), 2, "no model 'vit_b_17'"),
        (("factories:broken",), 1, "raised RuntimeError: no disk"),
    ],
)
def test_what_is_wrong_is_one_line(run, folder, words, code, expected):
    assert_one_line(run("convert", *words, "--to", "tensorflow", "-o", "saved"), code, expected)
    assert left_in(".") == ["factories.py"]


def test_a_folder_is_not_overwritten_by_an_onnx_file(run, folder):
    (folder / "mine").mkdir()
    assert_one_line(run("convert", "vit_b_16:tiny", "-o", "mine", "--overwrite"), 2, "mine is a folder")


def test_without_tensorflow_the_extra_is_named(run, folder, monkeypatch):
    monkeypatch.setattr("memopt.tensorflow.process.importlib.util.find_spec", lambda name: None)
    result = run("convert", "vit_b_16:tiny", "--to", "tensorflow", "-o", "saved")
    assert_one_line(result, 1, "writing a SavedModel needs tensorflow: pip install memopt[tensorflow]")
