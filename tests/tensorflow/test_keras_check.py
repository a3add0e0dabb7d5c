"""Which Keras files may be read, told without Keras: the configuration alone decides."""

import json
import sys
import zipfile
from pathlib import Path

import pytest

import memopt.tensorflow

h5py = pytest.importorskip("h5py", reason="needs memopt[tensorflow]")


@pytest.fixture(scope="module")
def check():
    from memopt.tensorflow.tasks import keras_check

    assert Path(keras_check.__file__).is_relative_to(Path(memopt.tensorflow.__file__).parent)
    return keras_check


def layer(kind="Dense", module="keras.layers", **more):
    return {"class_name": kind, "module": module, "config": {}, **more}


def archive(path, configuration):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("config.json", configuration if isinstance(configuration, str) else json.dumps(configuration))
    return {"path": str(path)}


@pytest.mark.parametrize(
    "given",
    [
        layer(),
        layer("Functional", "keras.src.models", config={"layers": [layer(), layer("ReLU", "keras.src.layers")]}),
        layer(module=None),
        layer("function", "builtins", registered_name="function"),
        {**layer(), "compile_config": layer("Lambda")},  # how it was trained is not read
    ],
)
def test_keras_s_own_layers_are_let_in(check, tmp_path, given):
    assert check.run(archive(tmp_path / "model.keras", given), None) == {}
    assert "keras" not in sys.modules


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (layer("Lambda"), "holds a Lambda layer, which is code"),
        (layer(config={"layers": [{"config": [layer("TFSMLayer")]}]}), "holds a TFSMLayer layer"),
        (layer("Mine", "my.layers"), "my.layers.Mine, which is no part of Keras"),
        (layer("get_file", "keras.utils"), "keras.utils.get_file, which is no part of Keras"),
        (layer("Dense", registered_name="package>Dense"), "package>Dense, which is no part of Keras"),
        (layer("Dense", "kerasx.layers"), "which is no part of Keras"),
    ],
)
def test_what_is_code_or_from_elsewhere_is_not(check, tmp_path, given, words):
    with pytest.raises(check.Unsafe, match=words):
        check.run(archive(tmp_path / "model.keras", given), None)


def test_the_older_format_is_checked_by_the_same_rule(check, tmp_path):
    for given, safe in ((layer(), True), (layer("Lambda"), False)):
        with h5py.File(tmp_path / "model.h5", "w") as file:
            file.attrs["model_config"] = json.dumps(given)
        if safe:
            assert check.run({"path": str(tmp_path / "model.h5")}, None) == {}
        else:
            with pytest.raises(check.Unsafe):
                check.run({"path": str(tmp_path / "model.h5")}, None)


def test_what_is_no_model_is_said_in_one_line(check, tmp_path):
    with pytest.raises(ValueError, match="is no Keras model: "):
        check.run(archive(tmp_path / "broken.keras", "{"), None)
    with zipfile.ZipFile(tmp_path / "empty.keras", "w") as file:
        file.writestr("other.json", "{}")
    with pytest.raises(ValueError, match="is no Keras model: "):
        check.run({"path": str(tmp_path / "empty.keras")}, None)
    with h5py.File(tmp_path / "weights.h5", "w"):
        pass
    with pytest.raises(ValueError, match="it holds weights only: save the whole model"):
        check.run({"path": str(tmp_path / "weights.h5")}, None)
    (tmp_path / "text.keras").write_text("no model")
    with pytest.raises(ValueError, match="is no Keras model: "):
        check.run({"path": str(tmp_path / "text.keras")}, None)
