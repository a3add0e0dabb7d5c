import numpy as np

from memopt.onnx.passes.share_initializers import ShareInitializers
from tests.onnx.build import apply, model, reasons, unchanged, weight

PASS = ShareInitializers()
TEXT = "(float[N,3] x) => (float[N,3] y) { a = Add(x, v) y = Mul(a, w) }"


def test_equal_weights_become_one() -> None:
    after, record = apply(PASS, model(TEXT, {"v": weight(3), "w": weight(3)}))
    assert list(after.graph.initializers) == ["v"]
    assert record.bytes_after == record.bytes_before // 2


def test_type_shape_and_sign_of_zero_tell_weights_apart() -> None:
    unchanged(PASS, model(TEXT, {"v": weight(3), "w": weight(1, 3)}))
    unchanged(PASS, model(TEXT, {"v": np.zeros(3, np.float32), "w": -np.zeros(3, np.float32)}))


def test_strings_are_compared_too() -> None:
    given = model(
        "(string[N] x) => (bool[N] y) { a = Equal(x, v) b = Equal(x, w) y = And(a, b) }",
        {"v": np.array(["a"], object), "w": np.array(["a"], object)},
        opset=19,
    )
    after, _ = apply(PASS, given)
    assert list(after.graph.initializers) == ["v"]


def test_what_a_caller_may_override_stays() -> None:
    given = model(TEXT.replace("x)", "x, float[3] w)", 1), {"v": weight(3), "w": weight(3)})
    assert "may override" in reasons(unchanged(PASS, given))


def test_a_branch_reads_the_outer_weight() -> None:
    given = model(
        "(bool c, float[3] x) => (float[3] y) { t = Add(x, v) y = If(c) <then_branch = g () => (float[3] a)"
        " <float[3] w = {0}> { a = Add(t, w) }, else_branch = h () => (float[3] b) { b = Neg(t) }> }".replace(
            " <float[3] w = {0}>", ""
        ),
        {"v": weight(3), "w": weight(3)},
    )
    inner = given.graph.node[1].attribute[0].g
    inner.initializer.append(given.graph.initializer.pop())
    after, _ = apply(PASS, given)
    assert all(not graph.initializers for graph in after.graph.subgraphs())
