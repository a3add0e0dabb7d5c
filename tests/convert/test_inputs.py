import pytest
import torch

from memopt.convert.inputs import Dynamic, InputSpec, dynamic_axes, named, parse_dynamic, parse_input, parse_inputs


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x=2x3x4", InputSpec("x", (2, 3, 4), torch.float32)),
        ("ids=2x16:int64", InputSpec("ids", (2, 16), torch.int64)),
        ("flag=scalar:bool", InputSpec("flag", (), torch.bool)),
        ("input.1=2x3", InputSpec("input.1", (2, 3), torch.float32)),
        ("images:0=2:int32", InputSpec("images:0", (2,), torch.int32)),
    ],
)
def test_input_as_typed(text, expected):
    assert parse_input(text) == expected
    made = expected.make()
    assert (tuple(made.shape), made.dtype) == (expected.shape, expected.dtype)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x", "write NAME="),
        ("=2x3", "write NAME="),
        ("x=2x", "write NAME="),
        ("x=-2", "write NAME="),
        ("a b=2", "write NAME="),
        ("x=2:float31", "unknown dtype 'float31': use one of float32"),
        ("x=2x0", "has 0 elements"),
        ("x=9999999999x9999999999", "elements"),
    ],
)
def test_input_of_another_form(text, message):
    with pytest.raises(ValueError, match=message):
        parse_input(text)


def test_several_inputs_each_once():
    assert [spec.name for spec in parse_inputs(["b=2", "a=3:int64"])] == ["b", "a"] and parse_inputs([]) == []
    with pytest.raises(ValueError, match=r"^input x is given twice$"):
        parse_inputs(["x=2", "y=2", "x=2:int64"])


def test_dynamic_as_typed():
    assert parse_dynamic("batch,sequence") == Dynamic(("batch", "sequence"))
    assert parse_dynamic("x:0=rows, y:1") == Dynamic((), {"x": {0: "rows"}, "y": {1: "y_1"}})
    assert parse_dynamic("none") == Dynamic(())


@pytest.mark.parametrize("text", ["", "batch,", "x:y", "x:0=", "none,batch", "none,x:0"])
def test_dynamic_of_another_form(text):
    with pytest.raises(ValueError, match=r"is no axis|none goes with"):
        parse_dynamic(text)


IDS = {"input_ids": torch.ones(2, 4, dtype=torch.int64), "decoder_input_ids": torch.ones(2, 3, dtype=torch.int64)}


def test_batch_and_sequence_vary_by_default_where_names_say_which_they_are():
    assert dynamic_axes(IDS, Dynamic()) == {
        "input_ids": {0: "batch", 1: "sequence"},
        "decoder_input_ids": {0: "batch", 1: "decoder_sequence"},
    }
    assert dynamic_axes({"images": torch.ones(2, 3, 8, 8)}, Dynamic()) == {"images": {0: "batch"}}
    assert dynamic_axes({"anything": torch.ones(2, 3, 8, 8)}, Dynamic()) == {}


def test_axes_asked_for():
    assert dynamic_axes(IDS, Dynamic(("sequence",))) == {
        "input_ids": {1: "sequence"},
        "decoder_input_ids": {1: "decoder_sequence"},
    }
    image = {"x": torch.ones(2, 3, 8, 8), "scale": torch.ones(())}
    assert dynamic_axes(image, Dynamic(("batch", "height"))) == {"x": {0: "batch", 2: "height"}}
    assert dynamic_axes(image, Dynamic((), {"x": {3: "columns"}})) == {"x": {3: "columns"}}
    assert dynamic_axes(IDS, Dynamic(())) == {}


@pytest.mark.parametrize(
    ("dynamic", "message"),
    [
        (Dynamic(("height",)), "no input has an axis height"),
        (Dynamic((), {"y": {0: "rows"}}), "there is no input y: the inputs are input_ids"),
        (Dynamic((), {"input_ids": {2: "rows"}}), "input_ids has 2 axes: there is no axis 2"),
    ],
)
def test_axes_that_are_not_there(dynamic, message):
    with pytest.raises(ValueError, match=message):
        dynamic_axes(IDS, dynamic)


def test_positions_get_the_names_of_forward():
    class Two(torch.nn.Module):
        def forward(self, a, b=None):
            return a

    class Many(torch.nn.Module):
        def forward(self, *parts):
            return parts[0]

    assert named(Two(), (1,)) == {"a": 1}
    assert named(Two(), (1, 2)) == {"a": 1, "b": 2}
    assert named(Two(), {"b": 2, "a": 1}) == {"b": 2, "a": 1}
    with pytest.raises(TypeError, match=r"Many.forward takes \*parts"):
        named(Many(), (1,))
    with pytest.raises(TypeError, match="too many"):
        named(Two(), (1, 2, 3))
