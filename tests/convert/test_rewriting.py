import numpy as np
import onnx_ir as ir
import pytest

from memopt.convert.errors import ConversionError, DifferenceError
from memopt.convert.rewriting import chosen_passes, rewritten
from memopt.onnx import STANDARD, OnnxPass
from tests.convert.onnx_models import sound


def names(passes):
    return [item.name for item in passes]


def test_levels_names_and_skips():
    assert chosen_passes(0) == ()
    assert names(chosen_passes(2)) == names(chosen_passes(3)) == names(STANDARD)
    assert set(names(chosen_passes(1))) < set(names(STANDARD))
    assert "fuse_conv_bn" not in names(chosen_passes(1))
    assert names(chosen_passes(2, ["eliminate_dead", "fold_constants"])) == ["eliminate_dead", "fold_constants"]
    assert names(chosen_passes(2, None, ["fold_constants"])) == [n for n in names(STANDARD) if n != "fold_constants"]
    assert chosen_passes(2, []) == ()


@pytest.mark.parametrize("words", [(2, ["fold_constant"], ()), (2, None, ["fold_constant"])])
def test_unknown_passes(words):
    with pytest.raises(ValueError, match=r"no pass 'fold_constant' \(did you mean fold_constants\?\); known: "):
        chosen_passes(*words)


def test_records_and_the_model_given():
    model = ir.from_proto(sound())
    before = str(model)
    found, records, notes = rewritten(model, STANDARD)
    assert [record.name for record in records] == names(STANDARD)
    assert notes == ()
    assert [node.op_type for node in found.graph] == ["MatMul", "Relu"]
    assert str(model) == before


def test_again_until_nothing_changes():
    reverse = chosen_passes(2, ["eliminate_dead", "merge_common", "fold_constants", "eliminate_no_ops"])
    _, records, _ = rewritten(ir.from_proto(sound()), reverse, repeat=True)
    assert len(records) % 4 == 0
    assert not any(record.changes for record in records[-4:])
    assert len(records) > 4


class Doubles(OnnxPass):
    """A pass that is wrong."""

    name = "doubles"

    def rewrite(self, edit):
        weight = edit.model.graph.initializers["w"]
        weight.const_value = ir.tensor(2 * weight.const_value.numpy(), name="w")
        edit.change("doubled w")


class Breaks(OnnxPass):
    """A pass that fails."""

    name = "breaks"

    def rewrite(self, edit):
        raise KeyError("w")


def test_a_guilty_pass_is_named():
    with pytest.raises(DifferenceError, match=r"pass doubles \(after eliminate_dead\): "):
        rewritten(ir.from_proto(sound()), (*chosen_passes(2, ["eliminate_dead"]), Doubles()))
    with pytest.raises(ConversionError, match=r"pass breaks: KeyError"):
        rewritten(ir.from_proto(sound()), (Breaks(),))


def test_large_models_are_proved_as_a_whole_only(monkeypatch):
    monkeypatch.setattr("memopt.convert.rewriting.PROVED_BYTES", 100)
    _, records, notes = rewritten(ir.from_proto(sound()), STANDARD)
    assert notes == ("passes were not proved one by one: weights above 100 bytes",)
    assert all(record.evidence is None for record in records)


def test_inputs_of_ones_own():
    feeds = [{"x": np.ones((5, 4), np.float32)}]
    _, records, _ = rewritten(ir.from_proto(sound()), STANDARD, inputs=feeds)
    assert any(record.evidence is not None and len(record.evidence.samples) == 1 for record in records)
