import json
import zipfile

import pytest
import torch

import memopt
from memopt.capture.export import from_exported_program
from memopt.pass_manager import PassManager
from memopt.tensorflow.keras_file import load_keras
from memopt.tensorflow.process import InputsError, TensorFlowError, UnsafeModelError
from tests.tensorflow.support import TRANSFORMER, needs_keras, script

pytestmark = needs_keras

MODELS = (
    TRANSFORMER
    + """
import keras
from keras import layers as L
keras.utils.set_random_seed(0)
made = keras.Model(*transformer(L))
made.save("transformer.keras")
made.save("transformer.h5")
import numpy
tokens = numpy.arange(36).reshape(3, 12) % 50
numpy.save("tokens.npy", tokens)
numpy.save("expected.npy", keras.ops.convert_to_numpy(made(tokens, training=False)))
a, b = keras.Input((4,), name="class"), keras.Input((4,), name="b.c")
keras.Model({"x": a, "y": b}, {"sum": L.Add()([a, b]), "rest": L.Subtract()([a, b])}).save("dictionary.keras")
image = keras.Input((None, None, 3), name="image")
hidden = L.BatchNormalization()(L.Conv2D(4, 3, padding="same", activation="relu")(image))
both = L.GlobalAveragePooling2D()(hidden)
keras.Model(image, [L.Dense(2, name="2 heads")(both), L.Dense(3, name="other")(both)]).save("image.keras")
ids = keras.Input((None,), dtype="int32", name="ids")
keras.Model(ids, L.GRU(4)(L.Embedding(9, 4, mask_zero=True)(ids))).save("recurrent.keras")
keras.Sequential([keras.Input((4,)), L.Lambda(lambda x: 2 * x)]).save("lambda.keras")
keras.Sequential([keras.Input((4,)), L.Lambda(lambda x: 2 * x)]).save("lambda.h5")
@keras.saving.register_keras_serializable(package="mine")
class Own(L.Dense):
    pass
keras.Sequential([keras.Input((4,)), Own(2)]).save("own.keras")
made.save_weights("only.weights.h5")
"""
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keras")
    script(folder, MODELS)
    return folder


@pytest.mark.parametrize("name", ["transformer.keras", "transformer.h5"])
def test_a_transformer_computes_what_keras_computes(files, name):
    numpy = pytest.importorskip("numpy")
    found = load_keras(files / name, dynamic=True)
    assert found.notes == ()
    tokens = torch.from_numpy(numpy.load(files / "tokens.npy")).int()
    expected = torch.from_numpy(numpy.load(files / "expected.npy"))
    result = found.exported.module()(tokens=tokens)
    assert list(result) == ["logits"]
    torch.testing.assert_close(result["logits"], expected)


def test_a_program_goes_through_every_pass_and_the_engines(files):
    exported = load_keras(files / "transformer.keras").exported
    program = from_exported_program(exported)
    rewritten = PassManager(memopt.INFERENCE, verify=True).run(program)[0]
    assert len(rewritten.calls) < len(program.calls)
    inputs = exported.example_inputs[1]
    expected = exported.module()(**inputs)["logits"]
    model = exported.module()
    for backend in ("aten", "static"):
        compiled = memopt.compile(model, backend=backend)
        with torch.no_grad():
            torch.testing.assert_close(compiled(**inputs)["logits"], expected)


def test_names_are_kept_where_python_allows_them(files):
    found = load_keras(files / "dictionary.keras", batch=3)
    inputs = found.exported.example_inputs[1]
    assert {name: tuple(value.shape) for name, value in inputs.items()} == {"input_class": (3, 4), "b_c": (3, 4)}
    result = found.exported.module()(**inputs)
    torch.testing.assert_close(result["sum"], inputs["input_class"] + inputs["b_c"])
    torch.testing.assert_close(result["rest"], inputs["input_class"] - inputs["b_c"])


def test_open_sizes_vary_or_are_given(files):
    found = load_keras(files / "image.keras", dynamic=True)
    result = found.exported.module()(image=torch.ones(5, 40, 30, 3))
    assert {name: tuple(value.shape) for name, value in result.items()} == {"input_2_heads": (5, 2), "other": (5, 3)}
    fixed = load_keras(files / "image.keras", inputs={"image": (1, 20, 24, 3)})
    assert fixed.exported.example_inputs[1]["image"].shape == (1, 20, 24, 3)
    with pytest.raises(InputsError, match=r"input image is \?x\?x\?x3, not 1x20x24x4"):
        load_keras(files / "image.keras", inputs={"image": (1, 20, 24, 4)})
    with pytest.raises(InputsError, match="there is no input picture: the model takes image"):
        load_keras(files / "image.keras", inputs={"picture": (1, 20, 24, 3)})


def test_sizes_that_keras_unrolls_are_said_to_be_fixed(files):
    found = load_keras(files / "recurrent.keras", dynamic=True)
    assert "axis 1 of ids is fixed at 16: Keras unrolls the model at that size" in found.notes


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lambda.keras", "lambda.keras holds a Lambda layer, which is code"),
        ("lambda.h5", "lambda.h5 holds a Lambda layer, which is code"),
        ("own.keras", "holds mine>Own, which is no part of Keras"),
    ],
)
def test_code_is_refused(files, name, expected):
    with pytest.raises(UnsafeModelError, match=expected):
        load_keras(files / name)


@pytest.mark.parametrize("module", ["os", "keras.utils", "keras.src.saving.saving_lib", "keras_nlp", "builtins"])
def test_classes_from_elsewhere_are_refused(files, tmp_path, module):
    path = tmp_path / "other.keras"
    with zipfile.ZipFile(files / "transformer.keras") as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            if name == "config.json":
                content = json.loads(data)
                content["config"]["layers"][2]["module"] = module
                data = json.dumps(content).encode()
            target.writestr(name, data)
    with pytest.raises(UnsafeModelError, match="which is no part of Keras"):
        load_keras(path)


def test_broken_files_are_one_line(files, tmp_path):
    whole = (files / "transformer.keras").read_bytes()
    for name, data in (("cut.keras", whole[: len(whole) // 2]), ("empty.h5", b""), ("text.h5", b"hello")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(TensorFlowError, match=rf"{name} is no Keras model: ") as caught:
            load_keras(tmp_path / name)
        assert "\n" not in str(caught.value)
    with pytest.raises(TensorFlowError, match="it holds weights only: save the whole model"):
        load_keras(files / "only.weights.h5")
    with pytest.raises(FileNotFoundError, match=r"no file .*missing\.keras"):
        load_keras(tmp_path / "missing.keras")


def test_flipped_weights_are_refused_or_read_never_a_crash(files, tmp_path):
    data = bytearray((files / "transformer.keras").read_bytes())
    start = data.index(b"\x89HDF")
    data[start + 8 : start + 600] = bytes(592)
    (tmp_path / "flipped.keras").write_bytes(bytes(data))
    with pytest.raises(TensorFlowError, match=r"flipped\.keras"):
        load_keras(tmp_path / "flipped.keras")
