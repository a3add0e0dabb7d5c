import pytest

from memopt.convert.options import Options
from memopt.onnx.passes.fuse_conv_relu import FuseConvRelu
from tests.onnx.build import apply, model, operators, reasons, unchanged, weight

PASS = FuseConvRelu()
WEIGHTS = {"w": weight(4, 2, 3, 3), "b": weight(4), "v": weight(4, 2, 3)}
X = "float[N,4,8,8] x"


def given(nodes: str, inputs: str = X, outputs: str = "float y"):
    return model(f"({inputs}) => ({outputs}) {{ {nodes} }}", WEIGHTS)


@pytest.mark.parametrize(
    "nodes",
    [
        "c = Conv<group=2, pads=[1,1,1,1]>(x, w, b) y = Relu(c)",
        "c = Conv<group=2, strides=[2,2], dilations=[2,2]>(x, w) y = Relu(c)",
        'c = Conv<group=2, auto_pad="SAME_UPPER">(x, w, b) y = Relu(c)',
    ],
)
def test_becomes_one_operator(nodes: str) -> None:
    after, record = apply(PASS, given(nodes))
    assert operators(after) == ["FusedConv"] and after.graph[0].domain == "com.microsoft"
    assert record.evidence is not None and record.evidence.max_rel_error < 1e-5


@pytest.mark.parametrize(
    ("nodes", "options", "reason"),
    [
        ("c = Conv<group=2>(x, w) r = Relu(c) y = Sub(r, c)", {}, "other users"),
        ("c = Conv<group=2>(x, w) y = Relu(c)", {"outputs": "float y, float c"}, "is an output"),
        ("c = Conv<group=2>(x, v) y = Relu(c)", {"inputs": "float[N,4,8] x"}, "two axes"),
        (
            "c = Conv(x, k) y = Relu(c)",
            {"inputs": "double[N,4,8,8] x, double[4,4,3,3] k", "outputs": "double y"},
            "float32",
        ),
    ],
)
def test_refused(nodes: str, options: dict[str, str], reason: str) -> None:
    assert reason in reasons(unchanged(PASS, given(nodes, **options)))


def test_others_stay() -> None:
    unchanged(PASS, given("c = Conv<group=2>(x, w) y = Sigmoid(c)"))


def test_models_of_lower_precision_do_without() -> None:
    assert any(isinstance(item, FuseConvRelu) for item in Options(target="onnxruntime").pipeline)
    assert not any(isinstance(item, FuseConvRelu) for item in Options(target="onnxruntime", dtype="fp16").pipeline)
