import numpy as np
import pytest

from memopt.onnx import STANDARD, OnnxPassManager, prepare
from memopt.onnx.samples import UnknownInput, samples
from tests.onnx.build import model, weight


def made(text: str, weights: dict[str, object] | None = None):
    return samples(prepare(model(text, weights)))


def test_dynamic_axes_take_several_sizes_and_one_name_has_one_size() -> None:
    found = made("(float[B,S,3] x, float[B,1] z) => (float y) { y = Add(x, z) }")
    shapes = [(sample.feeds["x"].shape, sample.feeds["z"].shape) for sample in found]
    assert shapes[:2] == [((2, 6, 3), (2, 1)), ((1, 3, 3), (1, 1))]
    assert str(found[0]) == "B=2, S=6" and len(found) > 2


def test_axes_without_a_name_are_apart() -> None:
    assert made("(float[?,?] x) => (float y) { y = Neg(x) }")[0].axes == {"x[0]": 2, "x[1]": 6}


@pytest.mark.parametrize("kind", ["float", "float16", "double", "int8", "uint64", "bool", "string"])
def test_types(kind: str) -> None:
    (value,) = made(f"({kind}[4] x) => ({kind}[4] y) {{ y = Identity(x) }}")[0].feeds.values()
    assert value.shape == (4,) and len(set(value.tolist())) > 1


def test_indices_stay_inside_every_table_that_they_reach() -> None:
    text = (
        "(int64[N,99] i) => (float y) { c = Cast<to=6>(i) s = Unsqueeze(c, k) a = Gather(t, s) b = Gather(u, i)"
        " d = ReduceSum<keepdims=0>(a) e = ReduceSum<keepdims=0>(b) y = Add(d, e) }"
    )
    feeds = made(text, {"t": weight(7, 2), "u": weight(40, 2), "k": np.array([0])})[0].feeds
    assert feeds["i"].min() == 0 and feeds["i"].max() == 6


def test_weights_that_are_inputs_keep_their_values() -> None:
    (sample, *_) = made("(float[N] x, float[1] w) => (float y) { y = Mul(x, w) }", {"w": weight(1)})
    assert list(sample.feeds) == ["x"]


def test_a_model_that_wants_long_inputs_gets_them() -> None:
    text = "(float[1,1,L] x) => (float y) { i = Identity(x) y = Conv<kernel_shape=[50]>(i, w) }"
    _, records = OnnxPassManager(STANDARD).run(model(text, {"w": weight(1, 1, 50)}))
    assert records[0].evidence is not None and records[0].evidence.samples == ("L=64", "L=400")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("(float[1000000,1000000] x) => (float y) { y = Neg(x) }", "more than 16777216 elements"),
        ("(seq(float[N]) x) => (seq(float[N]) y) { y = Identity(x) }", "no tensor"),
        ("(float8e4m3fn[N] x) => (float8e4m3fn[N] y) { y = Identity(x) }", "has type FLOAT8E4M3FN"),
    ],
)
def test_what_cannot_be_made_up_is_named(text: str, reason: str) -> None:
    with pytest.raises(UnknownInput, match=reason):
        made(text)
