import onnx

from memopt.onnx.passes.eliminate_dead import EliminateDead
from tests.onnx.build import apply, model, operators, unchanged, weight

PASS = EliminateDead()


def test_dead_chains_and_weights_go() -> None:
    given = model("(float[N] x) => (float[N] y) { y = Abs(x) a = Neg(x) b = Add(a, w) c = Exp(b) }", {"w": weight(1)})
    after, record = apply(PASS, given)
    assert operators(after) == ["Abs"] and not after.graph.initializers
    assert record.bytes_after == 0


def test_inputs_of_the_model_stay() -> None:
    after, _ = apply(PASS, model("(float[N] x, float[3] z) => (float[N] y) { a = Neg(z) y = Abs(x) }"))
    assert [value.name for value in after.graph.inputs] == ["x", "z"]


def test_a_dead_if_takes_what_its_branches_read_with_it() -> None:
    given = model(
        "(bool c, float[N] x) => (float[N] y) { y = Abs(x) t = Neg(x) d = If(c) <then_branch = g () => (float[N] a)"
        " { a = Exp(t) }, else_branch = h () => (float[N] b) { b = Identity(t) }> }"
    )
    assert operators(apply(PASS, given)[0]) == ["Abs"]


def test_inside_a_branch() -> None:
    given = model(
        "(bool c, float[N] x) => (float[N] y) { y = If(c) <then_branch = g () => (float[N] a)"
        " { a = Exp(x) z = Neg(x) }, else_branch = h () => (float[N] b) { b = Abs(x) }> }"
    )
    assert operators(apply(PASS, given)[0]) == ["If", "Exp", "Abs"]


def test_unread_results_are_not_computed() -> None:
    given = model("(float[N,3,8] x) => (float y) { y, i = MaxPool<kernel_shape=[2]>(x) }")
    after, _ = apply(PASS, given)
    assert len(after.graph[0].outputs) == 1


def test_functions_that_nothing_calls_go() -> None:
    given = model("(float[N] x) => (float[N] y) { y = local.used(x) }", local=1)
    for name in ("used", "unused"):
        body = onnx.helper.make_node("Neg", ["a"], ["b"])
        given.functions.append(
            onnx.helper.make_function("local", name, ["a"], ["b"], [body], [onnx.helper.make_opsetid("", 18)])
        )
    after, _ = apply(PASS, given)
    assert [key[1] for key in after.functions] == ["used"]


def test_nothing_to_do() -> None:
    unchanged(PASS, model("(float[N] x) => (float[N] y) { y = Abs(x) }"))
