import json

import pytest

from tests.cli.conftest import assert_one_line
from tests.tensorflow.support import TRANSFORMER, needs_keras, script

onnx = pytest.importorskip("onnx")
pytestmark = needs_keras


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keras")
    code = (
        TRANSFORMER
        + """
import keras
keras.utils.set_random_seed(0)
keras.Model(*transformer(keras.layers)).save("transformer.keras")
keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3), classes=10).save("resnet50.keras")
keras.Sequential([keras.Input((4,)), keras.layers.Lambda(lambda x: 2 * x)]).save("lambda.keras")
"""
    )
    script(folder, code)
    return folder


def test_a_transformer_becomes_verified_onnx_with_a_batch_that_varies(run, folder, files):
    result = run("convert", files / "transformer.keras", "-o", "m.onnx", "--format", "json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)["report"]
    assert [entry["shape"] for entry in record["inputs"]] == [["batch", 12]]
    assert [entry["name"] for entry in record["outputs"]] == ["logits"]
    assert [item["sizes"] for item in record["runs"]] == [{"batch": 2}, {"batch": 3}, {"batch": 1}]
    assert sum(record["nodes_after"].values()) < sum(record["nodes_before"].values())
    onnx.checker.check_model("m.onnx")


@pytest.mark.slow
def test_a_resnet_becomes_verified_onnx(run, folder, files):
    result = run("convert", files / "resnet50.keras", "-o", "m.onnx")
    assert result.exit_code == 0, result.output
    assert "equal to the source in 3 runs (batch 2; batch 3; batch 1)" in result.stdout
    assert (folder / "m.onnx").stat().st_size > 90e6


def test_shapes_may_be_fixed(run, files):
    result = run(
        "convert", files / "transformer.keras", "--dry-run", "--dynamic", "none", "--input", "tokens=3x12:int32"
    )
    assert result.exit_code == 0, result.output
    assert "tokens int32[3, 12]" in result.stdout


def test_where_its_bytes_go(run, files):
    result = run("inspect", files / "transformer.keras", "--batch", "4", "--format", "json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["report"]["breakdown"]["gradients"] == 0
    assert run("plan", files / "transformer.keras", "--budget", "1GB").exit_code == 0


def test_what_is_wrong_is_one_line_and_no_file(run, folder, files):
    (folder / "cut.keras").write_bytes((files / "transformer.keras").read_bytes()[:5000])
    before = sorted(folder.iterdir())
    for words, code, expected in (
        ((files / "lambda.keras",), 2, "holds a Lambda layer, which is code"),
        (("cut.keras",), 1, "cut.keras is no Keras model"),
        (("missing.h5",), 2, "no file missing.h5"),
        ((files / "transformer.keras", "--input", "ids=2x12"), 2, "there is no input ids: the model takes tokens"),
        ((files / "transformer.keras", "--dynamic", "batch"), 2, "has inputs and shapes of its own"),
    ):
        assert_one_line(run("convert", *words, "-o", "m.onnx"), code, expected)
        assert sorted(folder.iterdir()) == before


def test_without_keras_the_extra_is_named(run, folder, files, monkeypatch):
    monkeypatch.setattr("memopt.tensorflow.process.importlib.util.find_spec", lambda name: None)
    result = run("convert", files / "transformer.keras", "-o", "m.onnx")
    assert_one_line(result, 1, "reading .keras needs keras: pip install memopt[tensorflow]")
