"""The example inputs of a conversion: typed, given by the source, or derived from a config."""

from types import SimpleNamespace

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

from memopt.cli.conversion_inputs import conversion_inputs, derived_inputs
from memopt.cli.group import USAGE, CommandError
from memopt.cli.loading import Loaded
from memopt.convert.inputs import InputSpec, parse_inputs
from memopt.models import build
from tests.cli.conftest import assert_one_line
from tests.onnx.build import model as built


class Model(nn.Module):
    def forward(self, x, scale=None):
        return x if scale is None else x * scale


def shapes(inputs):
    return {name: tuple(value.shape) for name, value in inputs.items()}


def refusal(function, *args):
    with pytest.raises(CommandError) as caught:
        function(*args)
    assert caught.value.exit_code == USAGE and "\n" not in caught.value.message
    return caught.value.message


# -- as typed, and as the source has them -----------------------------------------------------------------------------


def test_what_is_typed_counts_before_what_the_source_has():
    loaded = Loaded("net", Model(), (torch.ones(7),))
    found = conversion_inputs(loaded, parse_inputs(["scale=3:float64", "x=2x3"]))
    assert list(found) == ["scale", "x"] and shapes(found) == {"scale": (3,), "x": (2, 3)}
    assert found["scale"].dtype is torch.float64
    assert shapes(conversion_inputs(loaded, ())) == {"x": (7,)}
    assert shapes(conversion_inputs(Loaded("net", Model(), {"x": torch.ones(2)}), ())) == {"x": (2,)}


def test_an_input_that_forward_does_not_take_is_named_with_those_it_takes():
    spec = InputSpec("y", (2,), torch.float32)
    assert refusal(conversion_inputs, Loaded("net", Model(), ()), [spec]) == (
        "net has no input y: its forward takes x, scale"
    )

    class Open(nn.Module):
        def forward(self, **given):
            return given["y"]

    assert shapes(conversion_inputs(Loaded("net", Open(), ()), [spec])) == {"y": (2,)}

    class Nothing(nn.Module):
        def forward(self):
            return torch.ones(1)

    assert refusal(conversion_inputs, Loaded("net", Nothing(), ()), [spec]).endswith("its forward takes nothing")


def test_a_source_without_inputs_says_what_to_add():
    said = refusal(conversion_inputs, Loaded("net", Model(), ()), ())
    assert said.startswith("the inputs of net are not known: add --input") and "forward takes x, scale" in said


def test_inputs_that_forward_refuses():
    loaded = Loaded("net", Model(), (torch.ones(1),) * 3)
    assert "net does not take its example inputs: too many" in refusal(conversion_inputs, loaded, ())


def test_a_model_of_tokens_gets_few_of_them():
    model = build("gpt2", tiny=True)
    found = conversion_inputs(Loaded("gpt2", model, model.example_inputs(8)), ())
    assert shapes(found) == {"input_ids": (2, min(16, model.sequence))}


# -- from a config ----------------------------------------------------------------------------------------------------


def hugging_face(main, forward, dtype=torch.float32, **config):
    """As models of transformers look from outside."""

    class Known(nn.Module):
        main_input_name = main

        def __init__(self):
            super().__init__()
            self.config, self.dtype = SimpleNamespace(**config), dtype

    Known.forward = forward
    return Known()


def text(self, attention_mask=None, input_ids=None, token_type_ids=None, bbox=None):
    """What a model of text takes, in an order of its own."""


def test_tokens_in_the_order_of_forward_with_what_goes_with_them():
    found = derived_inputs(hugging_face("input_ids", text, vocab_size=30, type_vocab_size=2))
    assert list(found) == ["attention_mask", "input_ids", "token_type_ids", "bbox"]
    assert shapes(found)["bbox"] == (2, 16, 4) and shapes(found)["token_type_ids"] == (2, 16)
    assert found["input_ids"].min() >= 5 and found["input_ids"].max() < 30 and found["attention_mask"].all()
    assert "token_type_ids" not in derived_inputs(hugging_face("input_ids", text, vocab_size=9, type_vocab_size=1))


@pytest.mark.parametrize(("most", "length"), [(8, 8), (100, 16), (None, 16), (-1, 16), (0, 16)])
def test_no_more_tokens_than_there_are_places(most, length):
    found = derived_inputs(hugging_face("input_ids", text, vocab_size=30, max_position_embeddings=most))
    assert shapes(found)["input_ids"] == (2, length)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_vocabulary_smaller_than_what_is_kept_free_for_special_tokens(size):
    ids = derived_inputs(hugging_face("input_ids", text, vocab_size=size))["input_ids"]
    assert int(ids.min()) >= 0 and int(ids.max()) < size


def test_a_decoder_has_tokens_of_another_length():
    def forward(self, input_ids, decoder_input_ids):
        """What a model of two stacks takes."""

    config = {"vocab_size": 30, "decoder": {"max_position_embeddings": 40}}
    found = derived_inputs(hugging_face("input_ids", forward, is_encoder_decoder=True, **config))
    assert shapes(found) == {"input_ids": (2, 16), "decoder_input_ids": (2, 12)}
    assert "decoder_input_ids" not in derived_inputs(hugging_face("input_ids", forward, **config))


def image(self, pixel_values):
    """What a model of images takes."""


@pytest.mark.parametrize(
    ("size", "expected"),
    [(32, (32, 32)), ([8, 16], (8, 16)), ({"height": 8, "width": 4}, (8, 4)), (None, (224, 224))],
)
def test_images(size, expected):
    found = derived_inputs(hugging_face("pixel_values", image, torch.bfloat16, image_size=size, num_channels=1))
    assert shapes(found) == {"pixel_values": (2, 1, *expected)} and found["pixel_values"].dtype is torch.bfloat16


@pytest.mark.parametrize("size", [{"shortest_edge": 224}, [224], [1, 2, 3], "224"])
def test_images_of_a_size_that_is_not_understood(size):
    said = refusal(derived_inputs, hugging_face("pixel_values", image, image_size=size))
    assert said == "the size of pixel_values is not known: add --input pixel_values=…:float32"


def test_text_and_images_together():
    def forward(self, input_ids, pixel_values, attention_mask=None):
        """What a model of both takes."""

    config = {"text_config": SimpleNamespace(vocab_size=50), "vision_config": {"image_size": 16}}
    found = derived_inputs(hugging_face("input_ids", forward, torch.float16, **config))
    assert shapes(found) == {"input_ids": (2, 16), "pixel_values": (2, 3, 16, 16), "attention_mask": (2, 16)}
    assert found["input_ids"].dtype is torch.int64 and found["pixel_values"].dtype is torch.float16


def test_sound():
    def features(self, input_features):
        """What a model of spectrograms takes."""

    def samples(self, input_values):
        """What a model of samples takes."""

    bins = {"num_mel_bins": 8, "max_source_positions": 50}
    assert shapes(derived_inputs(hugging_face("input_features", features, **bins))) == {"input_features": (2, 8, 100)}
    said = refusal(derived_inputs, hugging_face("input_features", features, num_mel_bins=8))
    assert said == "the shape of input_features is not known: add --input input_features=…:float32"
    assert shapes(derived_inputs(hugging_face("input_values", samples)))["input_values"] == (2, 3200)
    spectrogram = hugging_face("input_values", samples, num_mel_bins=8, max_length=100)
    assert shapes(derived_inputs(spectrogram))["input_values"] == (2, 100, 8)
    generation = hugging_face("input_values", samples, num_mel_bins=8, max_length=20)
    assert shapes(derived_inputs(generation))["input_values"] == (2, 3200)


def test_an_input_of_another_kind_is_named():
    said = refusal(derived_inputs, hugging_face("point_clouds", image))
    assert said == "Known takes point_clouds, whose shape is not known: add --input point_clouds=…:float32"


# -- on the command line ----------------------------------------------------------------------------------------------


def test_an_input_that_is_typed_twice(run, folder):
    onnx.save(built("(float[N,4] x) => (float[N,4] y) { y = Neg(x) }"), folder / "in.onnx")
    for source in ("in.onnx", "resnet18:tiny"):
        words = ("convert", source, "-o", "out.onnx", "--input", "x=2x4", "--input", "x=3x4")
        assert_one_line(run(*words), USAGE, "input x is given twice")
    assert not (folder / "out.onnx").exists()


@pytest.mark.parametrize("name", ["input.1", "images:0", "a/b"])
def test_an_input_of_an_onnx_file_under_its_own_name(run, folder, name):
    given = built("(float[N,4] x) => (float[N,4] y) { a = Identity(x) y = Neg(a) }")
    given.graph.input[0].name = given.graph.node[0].input[0] = name
    onnx.save(given, folder / "in.onnx")
    result = run("convert", "in.onnx", "-o", "out.onnx", "--input", f"{name}=3x4")
    assert result.exit_code == 0, result.stderr
    assert onnx.load(folder / "out.onnx").graph.input[0].name == name
    assert_one_line(run("convert", "in.onnx", "-o", "more.onnx", "--input", "other.1=3x4"), 2, "other.1", name)


def test_an_input_in_bfloat16_of_an_onnx_file(run, folder):
    given = built("(bfloat16[N,4] x) => (bfloat16[N,4] y) { a = Identity(x) b = MatMul(a, w) y = Tanh(b) }", opset=22)
    weight = np.ones((4, 4)).astype(ir.DataType.BFLOAT16.numpy())
    given.graph.initializer.append(ir.to_proto(ir.Tensor(weight, name="w")))
    onnx.save(given, folder / "in.onnx")
    result = run("convert", "in.onnx", "-o", "out.onnx", "--input", "x=2x4:bfloat16")
    assert result.exit_code == 0, result.stderr
    assert [node.op_type for node in onnx.load(folder / "out.onnx").graph.node] == ["MatMul", "Tanh"]
