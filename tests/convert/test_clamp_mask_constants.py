"""Constants that hide places from a softmax, where only softmaxes read them."""

import numpy as np
import pytest

from memopt.convert.clamp_mask_constants import within_float16
from memopt.onnx.edit import Edit
from memopt.onnx.load import prepare
from memopt.onnx.read import constant
from tests.onnx.build import model

LEAST = float(np.finfo(np.float16).min)
LOW = np.float32(-3.4e38)


def picked(body, least=LOW, opset=20, index=2, **domains):
    """What the first Where of a graph picks for hidden places, after and before."""
    text = f"(float[4,4] x, bool[4,4] m) => (float[4,4] y) {{ s = MatMul(x, x) {body} }}"
    given = prepare(model(text, {"zero": np.float32(0), "least": least, "one": np.float32(1)}, opset=opset, **domains))
    edit = Edit(given)
    within_float16(edit)
    found = []
    for graph in (edit.model.graph,):
        (where,) = [node for node in graph if node.op_type == "Where"]
        found.append(np.asarray(constant(where.inputs[index])))
    return found[0], edit.model


def test_what_only_a_softmax_takes_is_raised():
    found, after = picked("b = Where(m, zero, least) e = Add(s, b) y = Softmax(e)")
    assert found == LEAST and found.dtype == np.float32 and found.shape == ()
    assert "least" not in after.graph.initializers, "what nothing reads any more goes"


def test_the_other_branch_too_and_through_views():
    body = "b = Where(m, least, zero) c = Transpose(b) d = Identity(c) e = Add(d, s) y = Softmax(e)"
    assert picked(body, index=1)[0] == LEAST


@pytest.mark.parametrize(
    "body",
    [
        "b = Where(m, zero, least) e = Mul(s, b) y = Softmax(e)",
        "b = Where(m, zero, least) e = Add(s, b) f = Softmax(e) y = Add(f, b)",
        "b = Where(m, zero, least) y = Identity(b)",
        "b = Where(m, zero, least) e = Add(s, b) f = Softmax(e) y = Add(f, e)",
    ],
    ids=["multiplied", "read elsewhere", "an output", "the sum is read"],
)
def test_what_anything_else_reads_stays(body):
    assert picked(body)[0] == LOW


@pytest.mark.parametrize("least", [np.float32(-np.inf), np.float32(-1e4), np.float32(LEAST), np.float32(np.nan)])
def test_numbers_that_float16_holds_or_that_are_none_stay(least):
    np.testing.assert_array_equal(picked("b = Where(m, zero, least) e = Add(s, b) y = Softmax(e)", least)[0], least)


def test_a_whole_table_stays():
    least = np.full((4, 4), LOW, np.float32)
    np.testing.assert_array_equal(picked("b = Where(m, zero, least) e = Add(s, b) y = Softmax(e)", least)[0], least)


def test_a_constant_that_another_node_reads_keeps_its_own():
    body = "b = Where(m, zero, least) e = Add(s, b) f = Softmax(e) y = Max(f, least)"
    found, after = picked(body)
    assert found == LEAST
    (largest,) = [node for node in after.graph if node.op_type == "Max"]
    assert np.asarray(constant(largest.inputs[1])) == LOW
