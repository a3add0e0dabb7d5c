import numpy as np
import pytest

from memopt.onnx.load import prepare
from memopt.onnx.manager import OnnxPassManager
from memopt.onnx.passes.fold_constants import FoldConstants
from tests.onnx.build import apply, model, operators, reasons, unchanged, weight

PASS = FoldConstants()


def test_constants_become_initializers() -> None:
    given = model(
        "(float[N] x) => (float[N] y) { a = Constant<value_float=2.0>() b = Mul(x, a)"
        " c = Constant<value = float[1] {3}>() y = Add(b, c) }"
    )
    after, _ = apply(PASS, given)
    assert operators(after) == ["Mul", "Add"]
    assert sorted(float(v.const_value.numpy().reshape(())) for v in after.graph.initializers.values()) == [2.0, 3.0]


def test_a_chain_is_evaluated() -> None:
    given = model(
        "(float[N,4] x) => (float[N,4] y) { a = Transpose(w) b = MatMul(a, w) y = MatMul(x, b) }", {"w": weight(4, 4)}
    )
    after, record = apply(PASS, given)
    assert operators(after) == ["MatMul"]
    assert record.bytes_after <= record.bytes_before


def test_shapes_that_are_fixed_are_read_off() -> None:
    given = model(
        "(float[N,3,4] x) => (float y) { s = Shape<start=1>(x) p = Constant<value_ints=[-1]>() t = Concat<axis=0>(p, s)"
        " y = Reshape(x, t) }"
    )
    assert operators(apply(PASS, given)[0]) == ["Reshape"]


def test_a_dynamic_shape_stays() -> None:
    unchanged(PASS, model("(float[N,3] x) => (int64[2] y) { y = Shape(x) }"))


def test_the_file_does_not_grow_and_what_leads_to_a_large_value_is_still_folded() -> None:
    given = model(
        "(float[1,64] x) => (float y) { s = Mul(t, t) e = Expand(v, s) y = Add(x, e) }",
        {"v": weight(1, 64), "t": np.array([8, 1])},
    )
    after, record = apply(PASS, given)
    assert operators(after) == ["Expand", "Add"]
    assert "its value takes" in reasons(record)
    assert record.bytes_after <= record.bytes_before
    grown, record = apply(FoldConstants(growth=1 << 20), given)
    assert operators(grown) == ["Add"] and record.bytes_after > record.bytes_before


def test_a_size_that_would_fill_the_memory_is_refused() -> None:
    given = model(
        "(float[N] x) => (float y) { s = Constant<value_ints=[1000000,1000000]>() c = ConstantOfShape(s)"
        " m = ReduceMax<keepdims=0>(c) y = Add(x, m) }"
    )
    after, (record,) = OnnxPassManager([PASS], verify=False).run(given)
    assert "c would take 4000000000000 bytes" in reasons(record)
    assert "ConstantOfShape" in operators(after)


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ("a = RandomNormal<shape=[3]>()", "random"),
        ("a = DequantizeLinear(q, s)", "quantization"),
    ],
)
def test_refused(nodes: str, reason: str) -> None:
    given = model(
        f"(float[3] x) => (float y) {{ {nodes} y = Add(x, a) }}",
        {"q": np.array([1, 2, 3], np.int8), "s": np.float32(0.5)} if "q" in nodes else None,
    )
    assert reason in reasons(unchanged(PASS, given))


def test_an_initializer_that_is_an_input_is_no_constant() -> None:
    given = model("(float[3] x, float[3] w) => (float[3] y) { a = Neg(w) y = Add(x, a) }", {"w": weight(3)})
    unchanged(PASS, given)


def test_an_output_stays_computed() -> None:
    given = model("(float[3] x) => (float[3] y, float[3] z) { z = Neg(w) y = Add(x, w) }", {"w": weight(3)})
    assert "output" in reasons(unchanged(PASS, given))


def test_constants_of_outer_graphs_are_folded_inside_a_branch() -> None:
    given = model(
        "(bool c, float[3] x) => (float[3] y) { y = If(c) <then_branch = g () => (float[3] a)"
        " { k = Neg(w) a = Add(x, k) }, else_branch = h () => (float[3] b) { b = Sub(x, w) }> }",
        {"w": weight(3)},
    )
    grown, _ = apply(FoldConstants(growth=64), given)
    assert operators(grown) == ["If", "Add", "Sub"]


def test_unknown_domains_are_refused() -> None:
    given = model("(float[3] x) => (float[3] y) { a = custom.Thing(w) y = Add(x, a) }", {"w": weight(3)}, custom=1)
    result = PASS.run(prepare(given))
    assert [refusal.reason for refusal in result.refusals] == ["its domain is custom"]
