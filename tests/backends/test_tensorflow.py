import pytest
import torch
from torch import nn

import memopt
from memopt import models
from memopt.comparison.run import compare
from tests.tensorflow.support import needs_tensorflow

pytest.importorskip("onnx")
pytest.importorskip("jax")
# TensorFlow's own imports warn.
pytestmark = [needs_tensorflow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("name", ["bert_base", "mobilenet_v3_small"])
def test_inference_equals_pytorch_s(name):
    torch.manual_seed(0)
    model = models.build(name, tiny=True).eval()
    run = memopt.compile(model, backend="tensorflow")
    for batch in (2, 3):
        inputs = model.example_inputs(batch)
        with torch.no_grad():
            found, expected = run(**inputs), model(**inputs)
        assert found.stride() == expected.stride()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class Several(nn.Module):
    """Outputs by name, integers, bfloat16, and a buffer that moves."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, *, scale=2.0):
        self.calls += 1
        y = self.linear(x) * scale
        return {"y": y, "turned": y.t(), "best": y.argmax(-1), "half": y.bfloat16(), "none": None}


def test_structures_dtypes_and_buffers_are_kept():
    model = Several().eval()
    run = memopt.compile(model, backend="tensorflow")
    x = torch.randn(3, 4)
    with torch.no_grad():
        found = run(x, scale=3.0)
        assert float(model.calls) == 1
        expected = model(x, scale=3.0)
    assert list(found) == list(expected) and found["none"] is None
    for name in ("y", "turned", "best", "half"):
        assert found[name].dtype == expected[name].dtype and found[name].stride() == expected[name].stride()
        torch.testing.assert_close(found[name], expected[name], rtol=1e-2 if name == "half" else 1e-5, atol=1e-5)


def test_weights_that_change_are_taken_over():
    model = nn.Linear(4, 2).eval()
    run = memopt.compile(model, backend="tensorflow")
    x = torch.randn(3, 4)
    with torch.no_grad():
        run(x)
        model.weight.mul_(2)
        torch.testing.assert_close(run(x), model(x))


def test_what_it_cannot_do_is_said():
    model = nn.Linear(4, 2)
    with pytest.raises(ValueError, match="keeps no budget"):
        memopt.compile(model, "1GB", backend="tensorflow")
    with pytest.raises(Exception, match="computes no gradients"):
        memopt.compile(model, backend="tensorflow")(torch.randn(3, 4))
    dropping = memopt.compile(nn.Dropout(), backend="tensorflow")
    with torch.no_grad(), pytest.raises(Exception, match="random"):
        dropping(torch.randn(3, 4))


def test_without_tensorflow_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("memopt.backends.tensorflow.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs tensorflow: pip install memopt\[tensorflow\]"):
        memopt.compile(nn.Linear(2, 2), backend="tensorflow")


def test_compare_runs_it_as_an_engine_of_its_own():
    torch.manual_seed(0)
    model = models.build("gpt2", tiny=True).eval()
    options = {"peers": ("eager",), "repeats": 2, "warmup": 1, "keep_caches": True}
    eager, aten, tensorflow = compare(model, model.example_inputs(2), backends=("aten", "tensorflow"), **options).rows
    assert not tensorflow.reason and not tensorflow.differs
    assert len(tensorflow.seconds) == 2 and tensorflow.first_seconds > 0
    assert tensorflow.error < 1e-6 and tensorflow.process_bytes > max(aten.process_bytes, eager.process_bytes)
    inputs = model.example_inputs(2, labels=True)
    *_, trained = compare(model, inputs, backends=("tensorflow",), train=True, **options).rows
    assert trained.reason.endswith("computes no gradients: call the model under torch.no_grad()")
