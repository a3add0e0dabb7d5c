from memopt.onnx.passes.merge_common import MergeCommon
from tests.onnx.build import apply, model, operators, reasons, unchanged

PASS = MergeCommon()


def test_equal_nodes_become_one() -> None:
    given = model("(float[N] x) => (float[N] y) { a = Exp(x) b = Exp(x) c = Neg(a) d = Neg(b) y = Add(c, d) }")
    assert operators(apply(PASS, given)[0]) == ["Exp", "Neg", "Add"]


def test_attributes_and_left_out_inputs_tell_nodes_apart() -> None:
    unchanged(
        PASS,
        model(
            "(float[N,2] x, float l) => (float y) { a = Softmax<axis=0>(x) b = Softmax<axis=1>(x) c = Clip(a, l)"
            " d = Clip(a, , l) e = Add(b, c) y = Add(d, e) }"
        ),
    )


def test_one_result_may_be_an_output() -> None:
    given = model("(float[N] x) => (float[N] y, float[N] z) { a = Exp(x) y = Exp(x) z = Neg(a) }")
    after, _ = apply(PASS, given)
    assert operators(after) == ["Exp", "Neg"]
    assert [value.name for value in after.graph.outputs] == ["y", "z"]


def test_two_outputs_stay_two_nodes() -> None:
    given = model("(float[N] x) => (float[N] y, float[N] z) { y = Exp(x) z = Exp(x) }")
    assert "both results are outputs" in reasons(unchanged(PASS, given))


def test_random_nodes_stay() -> None:
    given = model("(float[N] x) => (float[N] y) { a = RandomNormalLike(x) b = RandomNormalLike(x) y = Add(a, b) }")
    assert "random" in reasons(unchanged(PASS, given))


def test_branches_are_left_alone() -> None:
    unchanged(
        PASS,
        model(
            "(bool c, float[N] x) => (float[N] y) { y = If(c) <then_branch = g () => (float[N] a) { a = Exp(x) },"
            " else_branch = h () => (float[N] b) { b = Exp(x) }> }"
        ),
    )


def test_inside_a_branch_nodes_are_merged() -> None:
    given = model(
        "(bool c, float[N] x) => (float[N] y) { y = If(c) <then_branch = g () => (float[N] a)"
        " { p = Exp(x) q = Exp(x) a = Add(p, q) }, else_branch = h () => (float[N] b) { b = Exp(x) }> }"
    )
    assert operators(apply(PASS, given)[0]) == ["If", "Exp", "Add", "Exp"]
