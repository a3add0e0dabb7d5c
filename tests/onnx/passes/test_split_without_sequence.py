import numpy as np
import pytest

from memopt.onnx.passes.split_without_sequence import SplitWithoutSequence
from tests.onnx.build import apply, model, operators, reasons, unchanged

PASS = SplitWithoutSequence()
INDICES = {"i": np.array(0), "j": np.array(-1)}


@pytest.mark.parametrize("sizes", [np.array([2, 4]), np.array(4), np.array(3)])
def test_becomes_split(sizes: np.ndarray) -> None:
    given = model(
        "(float[N,6] x) => (float y) { q = SplitToSequence<axis=1>(x, s) a = SequenceAt(q, i) b = SequenceAt(q, j)"
        " y = Concat<axis=1>(b, a) }",
        {"s": sizes, **INDICES},
    )
    after, record = apply(PASS, given)
    assert operators(after) == ["Split", "Concat"]
    assert record.evidence is not None and record.evidence.max_abs_error == 0.0


def test_outputs_of_the_model_keep_their_names() -> None:
    given = model(
        "(float[N,6] x) => (float y, float z) { q = SplitToSequence<axis=1>(x, s) y = SequenceAt(q, i)"
        " z = SequenceAt(q, i) }",
        {"s": np.array([2, 4]), "i": np.array(0)},
    )
    after, _ = apply(PASS, given)
    assert operators(after) == ["Split", "Identity"]
    assert [value.name for value in after.graph.outputs] == ["y", "z"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (") => (seq(float[N,M]) q) { q = SplitToSequence<axis=1>(x, s) }", "is an output"),
        (
            ") => (int64 n) { q = SplitToSequence<axis=1>(x, s) n = SequenceLength(q) }",
            "reads the sequence",
        ),
        (
            ", int64 k) => (float y) { q = SplitToSequence<axis=1>(x, s) y = SequenceAt(q, k) }",
            "reads the",
        ),
        (") => (float y) { q = SplitToSequence<axis=0>(x, t) y = SequenceAt(q, i) }", "dynamic axis"),
        (") => (float y) { q = SplitToSequence<keepdims=0>(x) y = SequenceAt(q, i) }", "lost their axis"),
    ],
)
def test_refused(text: str, reason: str) -> None:
    weights = {"s": np.array([2, 4]), "t": np.array(2), "i": np.array(0)}
    assert reason in reasons(unchanged(PASS, model(f"(float[N,6] x{text}", weights)))
