import numpy as np
import pytest

from memopt.onnx.passes.eliminate_no_ops import EliminateNoOps
from tests.onnx.build import apply, model, operators, reasons, unchanged, weight

PASS = EliminateNoOps()


@pytest.mark.parametrize(
    "nodes",
    [
        "a = Identity(r)",
        "a = Dropout(r)",
        "a = Cast<to=1>(r)",
        "a = Transpose<perm=[0,1,2]>(r)",
        "b = Transpose<perm=[2,0,1]>(r) a = Transpose<perm=[1,2,0]>(b)",
        "b = Transpose(r) a = Transpose(b)",
        "s = Constant<value_ints=[0,-1,4]>() a = Reshape(r, s)",
        "s = Constant<value_ints=[-1,3,4]>() a = Reshape(r, s)",
        "s = Constant<value_ints=[0]>() e = Constant<value_ints=[9223372036854775807]>() a = Slice(r, s, e, s)",
        "s = Constant<value_ints=[0,0]>() e = Constant<value_ints=[3,9]>() c = Constant<value_ints=[1,2]>() "
        "a = Slice(r, s, e, c)",
        "s = Constant<value_ints=[0,0,0,0,0,0]>() a = Pad(r, s)",
        "a = Concat<axis=1>(r)",
        "a = Sum(r)",
        "a = Split<num_outputs=1, axis=2>(r)",
        "o = Constant<value_float=1.0>() a = Mul(o, r)",
        "o = Constant<value_floats=[1.0,1.0,1.0,1.0]>() a = Div(r, o)",
        "o = Constant<value_float=0.0>() a = Sub(r, o)",
        "o = Constant<value_float=1.0>() a = Pow(r, o)",
    ],
)
def test_no_op_in_the_middle_goes(nodes: str) -> None:
    given = model(f"(float[N,3,4] x) => (float[N,3,4] y) {{ r = Abs(x) {nodes} y = Neg(a) }}")
    after, record = apply(PASS, given)
    assert [op for op in operators(after) if op != "Constant"] == ["Abs", "Neg"]
    assert record.evidence is not None and record.evidence.max_abs_error == 0.0


@pytest.mark.parametrize(
    "nodes",
    [
        "o = Constant<value_float=0.0>() a = Add(r, o)",  # -0 becomes 0
        "o = Constant<value_float=-0.0>() a = Sub(r, o)",
        "o = Constant<value_floats=[1.0,1.0,1.0,1.0]>() c = Constant<value_ints=[1,1,1,4]>() d = Reshape(o, c)"
        " a = Mul(r, d)",
        "o = Constant<value_float=1.0>() a = Div(o, r)",
        "a = Transpose<perm=[0,2,1]>(r)",
        "s = Constant<value_ints=[0]>() e = Constant<value_ints=[-1]>() a = Slice(r, s, e)",
        "s = Constant<value_ints=[-1,12]>() a = Reshape(r, s)",
        "s = Constant<value_ints=[0,0,0,0,0,1]>() a = Pad(r, s)",
        "a = Cast<to=11>(r)",
    ],
)
def test_what_does_something_stays(nodes: str) -> None:
    unchanged(PASS, model(f"(float[N,3,4] x) => (float y) {{ r = Abs(x) {nodes} y = Neg(a) }}"))


def test_expand_to_the_same_static_shape_goes_and_a_dynamic_one_stays() -> None:
    text = (
        "(float[{n},3] x) => (float[{n},3] y)"
        " {{ a = Abs(x) s = Constant<value_ints=[1,3]>() b = Expand(a, s) y = Neg(b) }}"
    )
    after, _ = apply(PASS, model(text.format(n=2)))
    assert operators(after) == ["Abs", "Neg"]
    unchanged(PASS, model(text.format(n="N")))


def test_two_transposes_become_one() -> None:
    given = model("(float[2,3,4] x) => (float y) { a = Transpose<perm=[1,0,2]>(x) y = Transpose<perm=[0,2,1]>(a) }")
    after, _ = apply(PASS, given)
    assert operators(after) == ["Transpose"]


def test_of_two_reshapes_the_first_goes() -> None:
    given = model(
        "(float[N,3,4] x) => (float y) { s = Constant<value_ints=[0,12]>() a = Reshape(x, s)"
        " t = Constant<value_ints=[-1,2]>() y = Reshape(a, t) }"
    )
    assert operators(apply(PASS, given)[0]) == ["Constant", "Reshape"]


def test_a_reshape_that_copies_an_axis_of_the_first_keeps_it() -> None:
    unchanged(
        PASS,
        model(
            "(float[N,3,4] x) => (float y) { s = Constant<value_ints=[-1,6]>() a = Reshape(x, s)"
            " t = Constant<value_ints=[0,2,3]>() y = Reshape(a, t) }"
        ),
    )


def test_concat_leaves_out_empty_inputs() -> None:
    given = model(
        "(float[2,3] x) => (float y) { a = Abs(x) b = Neg(x) y = Concat<axis=1>(a, e, b) }",
        {"e": np.zeros((2, 0), np.float32)},
    )
    after, record = apply(PASS, given)
    assert len(list(after.graph)[-1].inputs) == 2 and len(record.changes) == 1


def test_the_output_of_the_model_keeps_its_name() -> None:
    after, _ = apply(PASS, model("(float[N] x) => (float[N] y) { a = Abs(x) y = Identity(a) }"))
    assert operators(after) == ["Abs"]
    assert [value.name for value in after.graph.outputs] == ["y"]


@pytest.mark.parametrize(
    "graph",
    [
        "(float[N] x) => (float[N] y) { y = Identity(x) }",
        "(float[N] x) => (float[N] y, float[N] z) { y = Abs(x) z = Identity(y) }",
        "(float[N] x) => (float[N] z) { z = Identity(w) v = Add(x, w) }",
    ],
)
def test_an_output_needs_a_node_of_its_own(graph: str) -> None:
    given = model(graph, {"w": weight(3)} if "w" in graph else None)
    assert "needs a node of its own" in reasons(unchanged(PASS, given))


def test_identity_of_an_outer_value_stays_in_a_branch_and_goes_inside_it() -> None:
    given = model(
        "(bool c, float[N] x) => (float[N] y) { t = Abs(x) y = If(c) <then_branch = g () => (float[N] a) "
        "{ a = Identity(t) }, else_branch = h () => (float[N] b) { i = Identity(t) b = Neg(i) }> }"
    )
    after, record = apply(PASS, given)
    assert sorted(operators(after)) == ["Abs", "Identity", "If", "Neg"]
    assert "needs a node of its own" in reasons(record)


def test_training_dropout_is_refused() -> None:
    given = model(
        "(float[N] x) => (float[N] y) { r = Constant<value_float=0.5>() m = Constant<value = bool {1}>()"
        " a = Dropout(x, r, m) y = Neg(a) }"
    )
    assert "draw random numbers" in reasons(unchanged(PASS, given))


def test_a_dropout_whose_mask_is_read_stays() -> None:
    given = model("(float[N] x) => (float[N] y, bool[N] m) { a, m = Dropout(x) y = Neg(a) }")
    assert "other result is read" in reasons(unchanged(PASS, given))


def test_an_identity_of_a_sequence_goes() -> None:
    given = model(
        "(float[N] x) => (float[M] y) { s = SequenceConstruct(x, x) t = Identity(s) y = ConcatFromSequence<axis=0>(t) }"
    )
    assert operators(apply(PASS, given)[0]) == ["SequenceConstruct", "ConcatFromSequence"]
