import numpy as np
import pytest

from memopt.onnx.passes.simplify_shapes import SimplifyShapes
from tests.onnx.build import apply, model, operators, reasons, unchanged, weight

PASS = SimplifyShapes()
NUMBERS = {
    "n0": np.array([0]),
    "n1": np.array([1]),
    "n2": np.array([2]),
    "n4": np.array([4]),
    "n8": np.array([8]),
    "minus": np.array([-1]),
    "last": np.array([2**63 - 1]),
    "zero": np.array(0),
    "one": np.array(1),
    "table": weight(1, 16, 8),
}


def given(text: str, opset: int = 18):
    return model(text, NUMBERS, opset=opset)


def test_a_view_of_heads_is_constant() -> None:
    text = (
        "(float[B,S,8] x) => (float y) { b = Shape<start=0, end=1>(x) p = Squeeze(b) q = Reshape(p, minus)"
        " s = Shape<start=1, end=2>(x) t = Concat<axis=0>(q, s, n2, n4) r = Reshape<allowzero=1>(x, t)"
        " y = Transpose<perm=[0,2,1,3]>(r) }"
    )
    after, record = apply(PASS, given(text))
    assert operators(after) == ["Reshape", "Transpose"]
    assert after.graph[0].inputs[1].const_value.numpy().tolist() == [0, 0, 2, 4]
    assert record.evidence is not None and record.evidence.max_abs_error == 0.0


def test_a_minus_one_is_counted_out() -> None:
    text = (
        "(float[B,S,8] x) => (float y) { s = Shape<end=2>(x) t = Concat<axis=0>(s, minus, n4) r = Reshape(x, t)"
        " u = Shape(r) h = Slice(u, n2, last) v = Concat<axis=0>(minus, h) y = Reshape(r, v) }"
    )
    after, _ = apply(PASS, given(text))
    assert operators(after) == ["Reshape", "Reshape"]
    assert [node.inputs[1].const_value.numpy().tolist() for node in after.graph] == [[0, 0, 2, 4], [-1, 2, 4]]


def test_what_is_added_to_a_slice_of_a_table_has_the_length_of_the_other() -> None:
    text = (
        "(float[B,S,8] x) => (float y) { s = Shape<start=1, end=2>(x) p = Slice(table, n0, s, n1, n1) a = Add(x, p)"
        " b = Shape<end=1>(x) t = Concat<axis=0>(b, s, n2, n4) y = Reshape(a, t) }"
    )
    after, _ = apply(PASS, given(text))
    assert operators(after) == ["Shape", "Slice", "Add", "Reshape"]


def test_an_expand_to_its_own_shape_goes() -> None:
    text = (
        "(float[B,S] x) => (float y) { a = Neg(x) s = Shape(a) i = Gather(s, zero) u = Unsqueeze(i, n0)"
        " v = Shape<start=1>(x) t = Concat<axis=0>(u, v) e = Expand(a, t) y = Exp(e) }"
    )
    assert operators(apply(PASS, given(text))[0]) == ["Neg", "Exp"]


def test_a_fixed_axis_is_a_constant_and_equal_tensors_are_one() -> None:
    text = (
        "(float[B,8] x) => (int64 y, int64[1] z) { s = Shape(x) f = Gather(s, one) b = Gather(s, zero)"
        " c = Shape<end=1>(x) d = Shape<end=1>(x) e = Add(c, d) y = Add(f, b) z = Neg(e) }"
    )
    after, _ = apply(PASS, given(text))
    assert sorted(operators(after)) == ["Add", "Add", "Gather", "Neg", "Shape", "Shape"]
    assert any(value.const_value.numpy().tolist() == 8 for value in after.graph.initializers.values())


def test_turned_keys_are_one_transpose() -> None:
    text = (
        "(float[B,2,S,4] x) => (float y) { k = Neg(x) s = Shape(k) l = Slice(s, n2, last) f = Concat<axis=0>(minus, l)"
        " a = Reshape(k, f) b = Transpose<perm=[0,2,1]>(a) p = Slice(s, n0, n2) q = Gather(s, n2)"
        " t = Concat<axis=0>(p, n4, q) c = Reshape(b, t) y = Exp(c) }"
    )
    after, _ = apply(PASS, given(text))
    assert operators(after) == ["Neg", "Transpose", "Exp"]


def test_two_sizes_that_are_not_the_inputs_own_are_refused() -> None:
    text = "(float[B,S,8] x) => (float y) { t = Transpose<perm=[1,0,2]>(x) s = Shape(x) y = Reshape(t, s) }"
    assert "two sizes" in reasons(unchanged(PASS, given(text)))


@pytest.mark.parametrize(
    "text",
    [
        "(float[B,8] x, float[C,8] z) => (float y) { s = Shape(z) a = Neg(x) y = Expand(a, s) }",
        "(float[B,8] x, int64[2] s) => (float y) { y = Reshape(x, s) }",
        "(float[B,8] x) => (int64 y) { s = Shape(x) y = Neg(s) }",
    ],
)
def test_what_is_not_known_stays(text: str) -> None:
    unchanged(PASS, given(text))


def test_a_tensor_is_not_taken_from_what_went() -> None:
    text = (
        "(float[B,S,8] x) => (float y, int64[2] z) { s = Shape<end=2>(x) t = Concat<axis=0>(s, n2, n4)"
        " r = Reshape(x, t) p = Shape<end=2>(x) q = Concat<axis=0>(p, n2, n4) y = Reshape(x, q) z = Neg(p) v = Neg(r) }"
    )
    after, _ = apply(PASS, given(text))
    assert [value.name for value in after.graph.outputs] == ["y", "z"]
