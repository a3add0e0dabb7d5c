import numpy as np
import pytest

from memopt.onnx.passes.fuse_multi_head_attention import FuseMultiHeadAttention
from tests.onnx.build import apply, model, operators, reasons, unchanged

PASS = FuseMultiHeadAttention()
NUMBERS = {"h": np.array([0, 0, 2, 4]), "j": np.array([0, 0, 8]), "c": np.float32(0.5)}
INPUTS = "float[B,S,8] x, float[B,T,8] z, float[B,T,8] u"
HEADS = (
    "a = Reshape(x, h) q = Transpose<perm=[0,2,1,3]>(a) b = Reshape(z, h) k = Transpose<perm=[0,2,1,3]>(b)"
    " d = Reshape(u, h) v = Transpose<perm=[0,2,1,3]>(d)"
)
TURNED = HEADS.replace("k = Transpose<perm=[0,2,1,3]>", "t = Transpose<perm=[0,2,3,1]>")
NEGATED = HEADS.replace("Reshape(x, h) q", "Reshape(x, h) l = Neg(a) q").replace("(a) b", "(l) b")
JOIN = "o = Transpose<perm=[0,2,1,3]>(r) y = Reshape(o, j)"


def given(nodes: str, inputs: str = ""):
    return model(f"({INPUTS}{inputs}) => (float[B,S,8] y) {{ {nodes} }}", NUMBERS, opset=20)


@pytest.mark.parametrize(
    ("nodes", "inputs"),
    [
        (f"{HEADS} t = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, t) e = Mul(s, c) p = Softmax(e)", ""),
        (
            f"{HEADS} t = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, t) e = Mul(s, c) f = Add(e, m) p = Softmax(f)",
            ", float[B,2,S,T] m",
        ),
        (
            f"{TURNED} s = MatMul(q, t) p = Softmax(s)",
            "",
        ),
    ],
)
def test_becomes_one_operator(nodes: str, inputs: str) -> None:
    after, record = apply(PASS, given(f"{nodes} r = MatMul(p, v) {JOIN}", inputs))
    assert operators(after) == ["MultiHeadAttention"]
    assert after.graph[0].domain == "com.microsoft" and after.graph.opset_imports["com.microsoft"] == 1
    assert record.evidence is not None and record.evidence.max_rel_error < 1e-5
    assert [value.name for value in after.graph.outputs] == ["y"]


@pytest.mark.parametrize("mask", ["float[S,T] m", "float[1,S,T] m", "float[2,S,T] m"])
def test_a_mask_of_fewer_axes_gets_them(mask: str) -> None:
    scores = f"{HEADS} t = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, t) f = Add(s, m) p = Softmax(f)"
    after, record = apply(PASS, given(f"{scores} r = MatMul(p, v) {JOIN}", f", {mask}"))
    assert operators(after) == ["Unsqueeze", "MultiHeadAttention"]
    assert record.evidence is not None and record.evidence.max_rel_error < 1e-5


def test_a_mask_that_two_layers_read_gets_its_axes_once() -> None:
    def layer(x: str, n: int, y: str) -> str:
        heads = " ".join(
            f"{a}{n} = Reshape({given}, h) {name}{n} = Transpose<perm=[0,2,1,3]>({a}{n})"
            for a, given, name in (("a", x, "q"), ("b", "z", "k"), ("d", "u", "v"))
        )
        turned = f"t{n} = Transpose<perm=[0,1,3,2]>(k{n}) s{n} = MatMul(q{n}, t{n}) f{n} = Add(s{n}, w)"
        return f"{heads} {turned} p{n} = Softmax(f{n}) r{n} = MatMul(p{n}, v{n}) {joined(n, y)}"

    def joined(n: int, y: str) -> str:
        return f"o{n} = Transpose<perm=[0,2,1,3]>(r{n}) {y} = Reshape(o{n}, j)"

    nodes = f"w = Neg(m) {layer('x', 1, 'g')} {layer('g', 2, 'y')}"
    after, record = apply(PASS, given(nodes, ", float[S,T] m"))
    assert sorted(operators(after)) == ["MultiHeadAttention", "MultiHeadAttention", "Neg", "Unsqueeze"]
    assert record.evidence is not None and record.evidence.max_rel_error < 1e-5


TURN = "t = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, t) p = Softmax(s) r = MatMul(p, v)"


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        (f"{HEADS} {TURN} o = Transpose<perm=[0,2,3,1]>(r) y = Reshape(o, j)", "are not joined"),
        (f"{HEADS} {TURN} n = Neg(r) o = Transpose<perm=[0,2,1,3]>(n) y = Reshape(o, j)", "are not joined by"),
        (f"{NEGATED} {TURN} {JOIN}", "split off by"),
    ],
)
def test_refused(nodes: str, reason: str) -> None:
    assert reason in reasons(unchanged(PASS, given(nodes)))


@pytest.mark.parametrize(
    ("axis", "operator"), [("", False), ("<axis=1>", False), ("<axis=3>", True), ("<axis=-1>", True)]
)
def test_before_operator_set_13_a_softmax_goes_over_its_axis_and_all_behind_it(axis: str, operator: bool) -> None:
    nodes = f"{TURNED} s = MatMul(q, t) p = Softmax{axis}(s) r = MatMul(p, v) {JOIN}"
    older = model(f"({INPUTS}) => (float[B,S,8] y) {{ {nodes} }}", NUMBERS, opset=12)
    if operator:
        assert operators(apply(PASS, older)[0]) == ["MultiHeadAttention"]
    else:
        unchanged(PASS, older)


def test_scores_over_zero_have_no_factor() -> None:
    nodes = f"{TURNED} s = MatMul(q, t) e = Div(s, n) p = Softmax(e) r = MatMul(p, v) {JOIN}"
    numbers = {**NUMBERS, "n": np.float32(0)}
    unchanged(PASS, model(f"({INPUTS}) => (float[B,S,8] y) {{ {nodes} }}", numbers, opset=20))
