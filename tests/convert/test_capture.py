import pytest
import torch

from memopt.convert.capture import capture
from memopt.convert.errors import ConversionError


class Model(torch.nn.Module):
    def forward(self, x, y):
        return x + y.flatten()[0]


class Halves(torch.nn.Module):
    def forward(self, x):
        return x[::2] + x[1::2]


class Fixed(torch.nn.Module):
    def forward(self, x):
        return x.reshape(-1, 8) + x.reshape(2, -1)[0, 0]


class ByValue(torch.nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def test_sizes_that_vary_and_what_the_model_relates():
    inputs = {"x": torch.ones(3, 5), "y": torch.ones(4, 2)}
    captured = capture(Model(), inputs, {"x": {0: "rows"}, "y": {0: "rows"}}, required=True)
    assert [(axis.label, axis.example) for axis in captured.axes] == [("rows", 3), ("rows", 4)]
    first, second = captured.axes
    assert captured.shapes_at({first.symbol: 7, second.symbol: 9}) == {"x": (7, 5), "y": (9, 2)}
    assert captured.notes == ()


def test_a_size_that_is_a_multiple():
    captured = capture(Halves(), {"x": torch.ones(6)}, {"x": {0: "pairs"}}, required=True)
    (axis,) = captured.axes
    (shape,) = captured.shapes_at({axis.symbol: axis.example}).values()
    assert shape == (6,)


def test_an_axis_that_cannot_vary_is_a_note_or_an_error():
    inputs = {"x": torch.ones(2, 8)}
    captured = capture(Fixed(), inputs, {"x": {0: "batch", 1: "width"}}, required=False)
    assert "width (x, axis 1) is fixed at 8" in " ".join(captured.notes)
    with pytest.raises(ConversionError, match="is fixed at 8"):
        capture(Fixed(), inputs, {"x": {1: "width"}}, required=True)


def test_what_torch_export_cannot_capture_is_one_line():
    with pytest.raises(ConversionError, match=r"torch.export cannot capture ByValue: ") as caught:
        capture(ByValue(), {"x": torch.ones(2)}, {}, required=False)
    assert "\n" not in str(caught.value)
