import numpy as np
import pytest

from memopt.onnx.passes.fuse_skip_layer_norm import FuseSkipLayerNorm
from tests.onnx.build import apply, model, operators, reasons, unchanged, weight

PASS = FuseSkipLayerNorm()
WEIGHTS = {"s": weight(8), "b": weight(8, seed=1), "v": weight(8, seed=2), "m": weight(4, 8)}


def given(nodes: str, inputs: str = "float[B,S,8] x, float[B,S,8] z", outputs: str = "float[B,S,8] y"):
    return model(f"({inputs}) => ({outputs}) {{ {nodes} }}", WEIGHTS)


@pytest.mark.parametrize(
    "nodes",
    [
        "t = Add(x, z) y = LayerNormalization<epsilon=0.01>(t, s, b)",
        "t = Add(x, z) y = LayerNormalization(t, s)",
        "c = Neg(x) d = Add(c, v) t = Add(z, d) y = LayerNormalization(t, s, b)",
        "t = Add(x, z) n = LayerNormalization(t, s, b) y = Add(n, t)",
        "t = Add(x, z) e = Neg(t) n = LayerNormalization(t, s, b) y = Add(n, e)",
    ],
)
def test_becomes_one_operator(nodes: str) -> None:
    after, record = apply(PASS, given(nodes))
    assert "SkipLayerNormalization" in operators(after) and "LayerNormalization" not in operators(after)
    assert record.nodes_after < record.nodes_before
    assert record.evidence is not None and record.evidence.max_rel_error < 1e-5


ONE = {"inputs": "float[B,S,1] x, float[B,S,1] z", "outputs": "float[B,S,1] y"}


@pytest.mark.parametrize(
    ("nodes", "options", "reason"),
    [
        ("t = Add(x, z) y = LayerNormalization(t, s, b)", {"inputs": "float[B,S,8] x, float[1,S,8] z"}, "not known to"),
        ("t = Add(x, z) y = LayerNormalization(t, s, b)", {"inputs": "float[B,8] x, float[B,8] z"}, "three axes"),
        (
            "t = Add(x, z) y = LayerNormalization<axis=1>(t, m)",
            {"inputs": "float[B,4,8] x, float[B,4,8] z"},
            "last axis",
        ),
        ("t = Add(x, z) y, n = LayerNormalization(t, s, b)", {"outputs": "float y, float n"}, "statistics"),
        ("t = Add(x, z) y = LayerNormalization(t, s, b)", {"outputs": "float y, float t"}, "is an output"),
        ("t = Add(x, z) k = Constant<value_floats=[1.0]>() n = LayerNormalization(t, k) y = Add(n, t)", ONE, "made by"),
        ("t = Add(x, z) c = Neg(s) y = LayerNormalization(t, c, b)", {}, "is computed"),
        (
            "t = Add(x, z) k = Cast<to=11>(s) y = LayerNormalization(t, k)",
            {"inputs": "double[B,S,8] x, double[B,S,8] z", "outputs": "double y"},
            "computed",
        ),
    ],
)
def test_refused(nodes: str, options: dict[str, str], reason: str) -> None:
    assert reason in reasons(unchanged(PASS, given(nodes, **options)))


def test_a_bias_that_is_read_elsewhere_is_not_taken() -> None:
    nodes = "c = Neg(x) d = Add(c, v) t = Add(z, d) n = LayerNormalization(t, s, b) y = Add(n, d)"
    after, _ = apply(PASS, given(nodes))
    assert operators(after) == ["Neg", "Add", "SkipLayerNormalization", "Add"]
    assert np.array_equal([len(node.inputs) for node in after.graph], [1, 2, 4, 2])
