import numpy as np
import onnx
import onnx_ir as ir
import pytest

from memopt.onnx import (
    STANDARD,
    OnnxModelError,
    OnnxPass,
    OnnxPassError,
    OnnxPassManager,
    OnnxPassResult,
    fix_initializers,
    prepare,
)
from memopt.onnx.edit import Edit
from tests.onnx.build import model, weight

TEXT = "(float[N,3] x) => (float[N,3] y) { a = Mul(x, w) b = Identity(a) y = Relu(b) }"


class Wrong(OnnxPass):
    """Changes what is multiplied with."""

    name = "wrong"
    tolerance = 4.0

    def __init__(self, factor: float = 1.01) -> None:
        self.factor = factor

    def rewrite(self, edit: Edit) -> None:
        value = edit.model.graph.initializers["w"]
        value.const_value = ir.Tensor(value.const_value.numpy() * np.float32(self.factor), name="w")
        edit.change("scaled w")


class Broken(OnnxPass):
    """Makes a graph that no engine loads."""

    name = "broken"

    def rewrite(self, edit: Edit) -> None:
        list(edit.model.graph)[-1].op_type = "NoSuchOperator"
        edit.change("renamed")


class Renamed(Broken):
    name = "renamed"

    def rewrite(self, edit: Edit) -> None:
        edit.model.graph.outputs[0].name = "z"
        edit.change("renamed")


class Raises(Broken):
    name = "raises"

    def rewrite(self, edit: Edit) -> None:
        raise KeyError("w")


def test_records_say_what_was_done_and_proved() -> None:
    after, records = OnnxPassManager(STANDARD).run(model(TEXT, {"w": weight(3)}))
    assert [record.name for record in records] == [item.name for item in STANDARD]
    assert records[0].nodes_before == 3 and records[0].nodes_after == 2
    evidence = records[0].evidence
    assert evidence is not None and evidence.engine == "onnxruntime" and evidence.max_abs_error == 0.0
    assert evidence.samples == ("N=2", "N=1")
    assert [node.op_type for node in after.graph] == ["Mul", "Relu"]


@pytest.mark.parametrize(
    ("item", "cause"),
    [
        (Wrong(), "float64 error"),
        (Wrong(float("nan")), "NaN or infinity in other places"),
        (Broken(), "NoSuchOperator"),
        (Renamed(), "outputs are others"),
        (Raises(), "KeyError"),
    ],
)
def test_the_guilty_pass_is_named(item: OnnxPass, cause: str) -> None:
    with pytest.raises(OnnxPassError, match=f"pass {item.name} \\(after eliminate_no_ops\\): .*{cause}") as found:
        OnnxPassManager([STANDARD[0], item]).run(model(TEXT, {"w": weight(3) + 2}))
    assert found.value.pass_name == item.name


def test_the_reference_evaluator_is_asked_too() -> None:
    with pytest.raises(OnnxPassError, match="the reference evaluator says so too"):
        OnnxPassManager([Wrong()]).run(model(TEXT, {"w": weight(3) + 2}))


def test_without_verification_nothing_is_run() -> None:
    _, (record,) = OnnxPassManager([Wrong()], verify=False).run(model(TEXT, {"w": weight(3)}))
    assert record.evidence is None and record.notes == ("not compared: verification is off",)


def test_inputs_of_the_caller_are_used() -> None:
    inputs = [{"x": weight(5, 3)}, {"x": np.full((1, 3), np.inf, np.float32)}]
    _, records = OnnxPassManager(STANDARD, inputs=inputs).run(model(TEXT, {"w": weight(3)}))
    assert records[0].evidence is not None and len(records[0].evidence.samples) == 2


def test_integers_stay_inside_the_table() -> None:
    given = model(
        "(int64[B,S] ids, int64[B,S] mask) => (float[B,S,4] y) { a = Gather(w, ids) b = Identity(a)"
        " m = Cast<to=1>(mask) o = Constant<value_ints=[-1]>() u = Unsqueeze(m, o) y = Mul(b, u) }",
        {"w": weight(50, 4)},
    )
    _, records = OnnxPassManager(STANDARD).run(given)
    assert records[0].evidence is not None and records[0].evidence.samples == ("B=2, S=6", "B=1, S=3")


def test_a_model_that_draws_random_numbers_is_not_compared_and_says_so() -> None:
    given = model("(float[N] x) => (float[N] y) { r = RandomNormalLike(x) i = Identity(r) y = Add(x, i) }")
    _, records = OnnxPassManager(STANDARD).run(given)
    assert records[0].changes and records[0].evidence is None
    assert records[0].notes == ("not compared: the model draws random numbers",)


def test_a_sequence_input_is_not_made_up_and_says_so() -> None:
    given = model("(seq(float[N]) x) => (float[M] y) { i = Identity(x) y = ConcatFromSequence<axis=0>(i) }")
    _, records = OnnxPassManager(STANDARD).run(given)
    assert records[0].notes == ("not compared: input x is no tensor",)


def test_what_onnx_runtime_cannot_run_is_run_by_the_reference_evaluator() -> None:
    given = model("(float[N] x) => (float[N] y) { i = Identity(x) y = Neg(i) }", opset=onnx.defs.onnx_opset_version())
    _, records = OnnxPassManager(STANDARD).run(given)
    evidence = records[0].evidence
    assert evidence is not None and evidence.engine == "reference" and "not by onnxruntime" in evidence.notes[0]


def test_passes_must_be_passes() -> None:
    with pytest.raises(TypeError, match="OnnxPass instances"):
        OnnxPassManager([STANDARD])  # type: ignore[list-item]


def test_a_pass_must_return_a_result() -> None:
    class Nothing(OnnxPass):
        name = "nothing"

        def run(self, model: ir.Model) -> OnnxPassResult:
            return None  # type: ignore[return-value]

        def rewrite(self, edit: Edit) -> None:
            raise NotImplementedError

    with pytest.raises(OnnxPassError, match="returned NoneType"):
        OnnxPassManager([Nothing()]).run(model(TEXT, {"w": weight(3)}))


def swapped(given: onnx.ModelProto) -> onnx.ModelProto:
    nodes = list(given.graph.node)
    del given.graph.node[:]
    given.graph.node.extend(reversed(nodes))
    return given


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (swapped(model(TEXT, {"w": weight(3)})), "before anything makes it"),
        (model("(float[N] x) => (float[N] y) { a = Neg(x) }"), "nothing makes the output y"),
        (model("(float[N] x) => (float[N] y) { y = Neg(q) }"), "reads q before anything makes it"),
        (model("(map(int64, float) x) => (map(int64, float) y) { y = Identity(x) }"), "Map types"),
    ],
)
def test_broken_models_are_refused_in_one_line(given: onnx.ModelProto, reason: str) -> None:
    with pytest.raises(OnnxModelError, match=reason) as found:
        prepare(given)
    assert "\n" not in str(found.value)


def test_training_information_is_refused() -> None:
    given = model(TEXT, {"w": weight(3)})
    given.training_info.add()
    with pytest.raises(OnnxModelError, match="training information"):
        prepare(given)


def test_wrong_annotations_are_not_believed() -> None:
    given = model("(float[N,3] x) => (float[2] y) <float[2,5] a> { a = Neg(x) s = Shape(a) y = Cast<to=1>(s) }")
    _, records = OnnxPassManager(STANDARD).run(given)
    assert [record.changes for record in records] == [()] * len(records)


def test_initializers_leave_the_inputs_on_demand() -> None:
    given = prepare(model(TEXT.replace("x)", "x, float[3] w)", 1), {"w": weight(3)}))
    fixed, names = fix_initializers(given)
    assert names == ("w",) and [value.name for value in fixed.graph.inputs] == ["x"]
    assert [value.name for value in given.graph.inputs] == ["x", "w"]
    assert fix_initializers(fixed) == (fixed, ())
