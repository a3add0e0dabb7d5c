import numpy as np
import onnx_ir as ir
import pytest
import torch

import memopt
from memopt.convert.measure import as_file, costs
from memopt.onnx.load import prepare
from memopt.onnx.passes.order_nodes import peak_bytes
from tests.convert.onnx_models import saved, sound
from tests.onnx.build import model as built

WIDE = "(float[N,1024] x) => (float[N,1024] y) { a = Exp(x) b = Exp(a) c = Add(a, b) y = MatMul(c, w) }"
WEIGHTS = {"w": np.eye(1024, dtype=np.float32)}


@pytest.fixture(autouse=True)
def _unmeasured():
    """Here graphs are run."""


def test_the_estimate_counts_weights_inputs_and_what_is_alive():
    row = 1024 * 4
    model = prepare(built(WIDE, WEIGHTS, opset=20))
    # The weights; the input, and two results at the fullest moment.
    assert peak_bytes(model, {"N": 10}) == 1024 * row + 10 * row + 2 * 10 * row
    assert peak_bytes(model, {"N": 20}) - peak_bytes(model, {"N": 10}) == 30 * row
    unknown = built("(float[N,4] x) => (float[M] y) { a = NonZero(x) b = Cast<to=1>(a) y = ReduceSum(b) }", opset=20)
    assert peak_bytes(prepare(unknown), {}) is None


def test_measured_bytes_and_seconds_grow_with_the_model():
    small = ir.from_proto(built(WIDE, WEIGHTS, opset=20))
    large = ir.from_proto(built(WIDE.replace("1024", "4096"), {"w": np.eye(4096, dtype=np.float32)}, opset=20))
    feeds = {"x": np.ones((8, 1024), np.float32)}
    file = as_file(small)
    before, after = costs(small, small, (file, file), feeds)
    assert before.seconds and after.seconds
    assert before.peak_bytes and before.peak_bytes >= 1024 * 1024 * 4
    (other, _) = costs(large, large, (as_file(large),) * 2, {"x": np.ones((8, 4096), np.float32)})
    assert other.peak_bytes >= 4096 * 4096 * 4 > before.peak_bytes
    assert costs(small, small, (None, file), feeds)[1].seconds is None
    assert costs(small, small, (b"broken", file), feeds)[0].seconds is None


def test_large_weights_are_not_measured(monkeypatch):
    monkeypatch.setattr("memopt.convert.measure.MEASURED_BYTES", 100)
    assert as_file(ir.from_proto(sound())) is None


@pytest.mark.quick("False")
@pytest.mark.parametrize("measure", [True, False])
def test_records_say_what_a_run_takes(tmp_path, measure):
    record = memopt.export(torch.nn.Linear(64, 64), torch.ones(3, 64), tmp_path / "m.onnx", measure=measure)
    text = record.to_text()
    for title in ("peak, estimated", "peak, measured", "latency on this CPU"):
        assert (title in text) == measure
    assert (record.cost_after.seconds is not None) == measure
    assert record.bytes_before >= 64 * 65 * 4
    again = memopt.export(saved(tmp_path, sound()), None, None, measure=measure)
    assert (again.cost_before.peak_bytes is not None) == measure
