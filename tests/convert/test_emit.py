import onnx
import onnx_ir as ir
import pytest
import torch

from memopt.convert.capture import capture
from memopt.convert.emit import emit, output_names, tensors
from memopt.convert.errors import ConversionError
from memopt.convert.verify import Runner


def emitted(model, inputs, axes=None, **options):
    with torch.no_grad():
        names = output_names(model(**inputs))
    return emit(capture(model, inputs, axes or {}, required=True), names, **options)


class Twice(torch.nn.Module):
    def forward(self, x):
        y = x * 2
        return {"first": y, "same": y, "given": x, "nested": [y + 1, None]}


class Named(torch.nn.Module):
    """Outputs that are called like an input and like a parameter."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x):
        return {"x": x * self.weight, "weight": x + 1}


class Batch(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.norm = torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4, track_running_stats=False)

    def forward(self, x):
        return self.norm(self.convolution(x))


def test_outputs_are_named_by_key_and_place():
    assert output_names(torch.ones(1)) == ("output",)
    assert output_names((torch.ones(1), [torch.ones(1)])) == ("output_0", "output_1_0")
    assert output_names({"a": torch.ones(1), "b c": (torch.ones(1), None)}) == ("a", "b_c_0")
    assert len(tensors({"a": torch.ones(1), "b": (torch.ones(1), None)})) == 2
    with pytest.raises(ConversionError, match="the model returns b_1, of type int"):
        output_names({"a": torch.ones(1), "b": (torch.ones(1), 4)})


def test_an_output_twice_and_an_input_as_output():
    model = emitted(Twice(), {"x": torch.ones(3)})
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert [value.name for value in model.graph.outputs] == ["first", "same", "given", "nested_0"]
    found = Runner(ir.to_proto(model).SerializeToString())({"x": torch.ones(3)})
    assert [value[0].item() for value in found] == [2, 2, 1, 3]


def test_output_names_that_are_taken():
    model = emitted(Named(), {"x": torch.ones(3)})
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert [value.name for value in model.graph.outputs] == ["x_1", "weight"]
    found = Runner(ir.to_proto(model).SerializeToString())({"x": 2 * torch.ones(3)})
    assert [value[0].item() for value in found] == [2, 3]


def test_axes_have_names_and_nothing_of_this_machine_remains():
    model = emitted(torch.nn.Flatten(), {"input": torch.ones(2, 3, 4)}, {"input": {0: "rows", 1: "depth"}})
    assert [str(size) for size in model.graph.inputs[0].shape] == ["rows", "depth", "4"]
    assert [str(size) for size in model.graph.outputs[0].shape] == ["rows", "4*depth"]
    text = str(ir.to_proto(model))
    assert "stack_trace" not in text
    assert "site-packages" not in text


def test_batch_norm_with_the_batchs_own_statistics_keeps_its_numbers():
    model, x = Batch().eval(), torch.randn(2, 3, 6, 6)
    (found,) = Runner(ir.to_proto(emitted(model, {"x": x})).SerializeToString())({"x": x})
    torch.testing.assert_close(found, model(x))


def test_the_opset_is_the_one_asked_for():
    assert emitted(torch.nn.ReLU(), {"input": torch.ones(2)}, opset=18).graph.opset_imports[""] == 18


def test_an_operator_without_translation_is_one_line():
    class Bessel(torch.nn.Module):
        def forward(self, x):
            return torch.special.bessel_j0(x)

    with pytest.raises(ConversionError, match=r"cannot export the model: .*bessel_j0") as caught:
        emitted(Bessel(), {"x": torch.ones(2)})
    assert "\n" not in str(caught.value)
