import json

import pytest

from tests.cli.conftest import assert_one_line, left_in
from tests.tensorflow.support import needs_tensorflow, script

pytest.importorskip("onnx")
pytest.importorskip("jax")
pytestmark = needs_tensorflow

MODEL = """
import tensorflow as tf
class Plain(tf.Module):
    @tf.function(input_signature=[tf.TensorSpec([None, 4], name="x")])
    def f(self, x):
        return {"y": tf.nn.softmax(x @ tf.ones((4, 3)))}
plain = Plain()
tf.saved_model.save(plain, "saved", signatures=plain.f)
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    script(folder, MODEL)
    return folder / "saved"


def test_a_saved_model_becomes_an_onnx_file(run, folder, saved):
    result = run("convert", saved, "-o", "m.onnx")
    assert result.exit_code == 0, result.output
    assert "x float[batch, 4]" in result.stdout and "equal to the source in 3 runs" in result.stdout
    assert left_in(".") == ["factories.py", "m.onnx"]


def test_a_saved_model_before_and_after_xla(run, saved):
    result = run("inspect", saved, "--batch", "5")
    assert result.exit_code == 0, result.output
    assert "measured at x 5x4" in result.stdout and "equal to TensorFlow" in result.stdout
    assert json.loads(run("inspect", saved, "--format", "json").stdout)["shapes"] == {"x": [2, 4]}
    assert_one_line(run("inspect", saved, "--format", "html"), 2, "text or json")


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (("--dynamic", "batch"), 2, "has shapes of its own: leave --dynamic"),
        (("--opset", "20"), 2, "converted to opset 18 at most"),
        (("--dtype", "fp16"), 2, "convert the SavedModel to ONNX first"),
        (("--input", "z=2x4"), 2, "there is no input z: the signature takes x"),
        (("--to", "tensorflow"), 2, "is a SavedModel already"),
    ],
)
def test_what_is_wrong_is_one_line(run, folder, saved, words, code, expected):
    assert_one_line(run("convert", saved, *words, "-o", "out"), code, expected)
    assert left_in(".") == ["factories.py"]


def test_other_verbs_say_what_to_do(run, saved):
    assert_one_line(run("plan", saved), 2, "is a SavedModel, which memopt convert and memopt inspect read")


def test_a_broken_one_and_a_missing_extra(run, folder, saved, monkeypatch):
    (folder / "broken").mkdir()
    (folder / "broken" / "saved_model.pb").write_bytes(b"\xff")
    assert_one_line(run("convert", "broken", "-o", "m.onnx"), 1, "broken is no SavedModel")
    monkeypatch.setattr("memopt.tensorflow.process.importlib.util.find_spec", lambda name: None)
    expected = "converting a SavedModel needs tensorflow: pip install memopt[tensorflow]"
    assert_one_line(run("convert", saved, "-o", "m.onnx"), 1, expected)
    assert left_in(".") == ["broken", "factories.py"]
