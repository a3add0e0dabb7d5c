import pytest
import torch

from memopt import models
from memopt.convert.reference import run, run_wide


@pytest.mark.parametrize("name", ["resnet18", "gpt2", "llama_1b", "mobilenet_v3_small"])
def test_float64_reference_is_the_model_in_float64(name):
    model = models.build(f"{name}:tiny").eval()
    inputs = model.example_inputs(2)
    (found,) = run_wide(model, inputs)
    wide = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
    expected = model.double()(**wide)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


class Narrowing(torch.nn.Module):
    """Says its dtypes itself, writes in place, and makes tensors of its own."""

    def forward(self, x):
        y = torch.zeros(x.shape, dtype=torch.float32)
        y += x.to(torch.float16).to(torch.float32)
        return y.div_(3.0)


def test_what_the_code_narrows_is_wide_too():
    x = torch.randn(5)
    (found,) = run_wide(Narrowing(), {"x": x})
    torch.testing.assert_close(found, x.double() / 3, rtol=1e-15, atol=0)
    assert run(Narrowing(), {"x": x})[0].dtype == torch.float32


def test_a_function_that_is_no_module():
    (found,) = run_wide(lambda x: x / 3, {"x": torch.ones(2)})
    assert found.tolist() == [1 / 3, 1 / 3]


def test_no_reference_where_the_code_refuses():
    def strict(x):
        y = x + 1
        if y.dtype != torch.float32:
            raise TypeError("float32 only")
        return y

    assert run_wide(strict, {"x": torch.ones(2)}) is None
