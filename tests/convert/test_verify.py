import onnx_ir as ir
import pytest
import torch

from memopt.convert.capture import Axis, capture
from memopt.convert.emit import emit
from memopt.convert.errors import ConversionError, DifferenceError
from memopt.convert.verify import (
    FLOOR_ULP,
    RATIO,
    Runner,
    _compared,
    compare,
    expect,
    like,
    made_inputs,
    reason_of,
    trials,
    verify,
)

EPS = torch.finfo(torch.float32).eps


def test_sizes_tried_lie_in_the_ranges_and_share_by_label():
    axes = (Axis("s0", "batch", 2, 2, None), Axis("s1", "length", 16, 2, 17), Axis("s2", "batch", 2, 2, None))
    made = trials(axes)
    assert made[0] == {"batch": 2, "length": 16}
    assert all(1 <= sizes["length"] <= 17 for sizes in made)
    assert {sizes["batch"] for sizes in made} >= {1, 2, 3}
    assert trials(()) == [{}]
    assert trials((Axis("s0", "size", 9, 8, 9),)) == [{"size": 9}, {"size": 8}]


def test_made_up_values_are_like_the_example():
    generator = torch.Generator().manual_seed(0)
    ids = like(torch.tensor([[7, 9], [9, 7]]), (5, 6), generator)
    assert set(ids.flatten().tolist()) == {7, 9}
    floats = like(torch.full((100,), 5.0) + torch.randn(100), (1000,), generator)
    assert 4.5 < floats.mean() < 5.5
    assert like(torch.ones(0, 3), (0, 4), generator).shape == (0, 4)


class Embedded(torch.nn.Module):
    """The sum of all places before, which hidden places see too."""

    def __init__(self, hidden_sees=0.0):
        super().__init__()
        self.embedding, self.hidden_sees = torch.nn.Embedding(9, 4), hidden_sees

    def forward(self, input_ids, attention_mask):
        values = self.embedding(input_ids)
        shown = (values * attention_mask.unsqueeze(-1)).cumsum(1)
        return torch.where(attention_mask.unsqueeze(-1) == 1, shown, shown + self.hidden_sees * values)


def masked(model=None, length=9):
    inputs = {
        "input_ids": torch.randint(5, 9, (2, length)),
        "attention_mask": torch.ones(2, length, dtype=torch.int64),
    }
    axes = {name: {0: "batch", 1: "sequence"} for name in inputs}
    return capture(model or Embedded(), inputs, axes, required=True)


def test_masks_hide_the_end_of_a_row_or_its_start_and_the_tokens_there_are_padding():
    captured = masked()
    least = captured.inputs["input_ids"].min()
    made = made_inputs(captured, {"batch": 2, "sequence": 6}, 1)
    assert made["attention_mask"].tolist() == [[1] * 6, [1, 1, 1, 1, 0, 0]]
    assert made["input_ids"][1, 4:].tolist() == [least, least]
    made = made_inputs(captured, {"batch": 2, "sequence": 6}, 2)
    assert made["attention_mask"].tolist() == [[0, 0, 1, 1, 1, 1], [1] * 6]
    assert made["input_ids"][0, :2].tolist() == [least, least]


def test_both_kinds_of_padding_are_among_what_is_compared():
    masks = [item.inputs["attention_mask"] for item in expect(masked())]
    assert any((mask[:, 0] == 0).any() for mask in masks)
    assert any((mask[:, -1] == 0).any() for mask in masks)


def test_only_what_depends_on_hidden_tokens_may_differ():
    expected, other = (expect(masked(Embedded(share))) for share in (1.0, -1.0))
    for a, b in zip(expected, other, strict=True):
        if a.settled is None:
            assert (a.inputs["attention_mask"] == 1).all()
            continue
        hidden = (a.inputs["attention_mask"] == 0).unsqueeze(-1).expand(a.outputs[0].shape)
        assert torch.equal(~a.settled[0], hidden)
        spoiled = torch.where(hidden, b.outputs[0] + 100, a.outputs[0])
        assert _compared(a, ["y"], [spoiled], 0.0).visible_only
        assert not _compared(a, ["y"], a.outputs, 0.0).visible_only
        with pytest.raises(DifferenceError):
            _compared(a, ["y"], [torch.where(hidden, a.outputs[0], a.outputs[0] + 1)], 0.0)


@torch.no_grad()
def test_a_hidden_place_is_left_out_whole_where_some_of_its_values_are_the_same_by_chance():
    model = Embedded(1.0)
    model.embedding.weight[:, 0] = 0.5
    for item in expect(masked(model)):
        if item.settled is not None:
            hidden = (item.inputs["attention_mask"] == 0).unsqueeze(-1).expand(item.outputs[0].shape)
            assert torch.equal(~item.settled[0], hidden)
            assert _compared(item, ["y"], [item.outputs[0] + hidden], 0.0).visible_only


def test_models_of_fixed_shapes_are_compared_on_several_inputs():
    captured = capture(torch.nn.ReLU(), {"input": torch.randn(3, 4)}, {}, required=True)
    inputs = [item.inputs["input"] for item in expect(captured)]
    assert len(inputs) == 3
    assert not torch.equal(inputs[1], inputs[2])


def test_errors_up_to_the_limit_pass_and_above_it_fail():
    wide = torch.tensor([1.0, 100.0], dtype=torch.float64)
    expected = wide.float() + torch.tensor([1e-4, 0.0])
    limit = RATIO * 1e-4 + FLOOR_ULP[torch.float32] * EPS * 100
    found = compare("y", wide.float() + torch.tensor([0.9 * limit, 0.0]), expected, wide)
    assert found.error == pytest.approx(0.9 * limit, rel=1e-2)
    assert found.torch_error == pytest.approx(1e-4, rel=1e-2)
    with pytest.raises(DifferenceError, match=r"output y is off by .* from float64 at batch 3"):
        compare("y", wide.float() + torch.tensor([1.1 * limit, 0.0]), expected, wide, " at batch 3")
    with pytest.raises(DifferenceError, match="from PyTorch"):
        compare("y", expected + 2 * FLOOR_ULP[torch.float32] * EPS * 100, expected, None)


@pytest.mark.parametrize(
    ("found", "expected", "message"),
    [
        (torch.ones(2), torch.ones(3), r"is torch.float32\[2\], in PyTorch torch.float32\[3\]"),
        (torch.ones(2).double(), torch.ones(2), "is torch.float64"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "1 of 2 values differ"),
        (torch.tensor([1.0, torch.nan]), torch.ones(2), "NaN or infinite"),
        (torch.tensor([torch.inf]), torch.tensor([-torch.inf]), "NaN or infinite"),
        (torch.tensor([torch.nan]), torch.tensor([torch.inf]), "NaN or infinite"),
        (torch.tensor([1e-3, 0.0]), torch.zeros(2), "is off"),
    ],
)
def test_what_is_never_equal(found, expected, message):
    with pytest.raises(DifferenceError, match=message):
        compare("y", found, expected, expected.double() if expected.is_floating_point() else None)


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([1.0, torch.nan, torch.inf, -torch.inf]),
        torch.ones(0),
        torch.tensor([True]),
        torch.full((2,), torch.nan),
    ],
)
def test_what_is_equal(value):
    assert compare("y", value.clone(), value, None).max_abs == 0.0


class Scaled(torch.nn.Module):
    def forward(self, x):
        return x * 3 + x.shape[0]


def payload(model, rows="rows"):
    inputs = {"x": torch.randn(4, 2)}
    captured = capture(model, inputs, {"x": {0: rows}} if rows else {}, required=True)
    return captured, emit(captured, ["y"])


def test_equal_models_at_every_size():
    captured, model = payload(Scaled())
    runs = verify(expect(captured), ir.to_proto(model).SerializeToString(), ["y"])
    assert [run.sizes["rows"] for run in runs] == [4, 5, 2, 1]
    assert all(output.max_abs == 0 for run in runs for output in run.outputs)


def test_a_size_that_was_baked_in_is_found():
    """At the example's own size the graph is right; at another one it is not."""
    captured, _ = payload(Scaled())
    _, fixed = payload(Scaled(), None)
    for value in (*fixed.graph.inputs, *fixed.graph.outputs):
        value.shape = ir.Shape(["rows", 2])
    for node in fixed.graph:
        for value in node.outputs:
            value.shape = None
    with pytest.raises(DifferenceError, match=r"output y is off by .* at rows 5"):
        verify(expect(captured), ir.to_proto(fixed).SerializeToString(), ["y"])


def test_a_model_that_onnx_runtime_refuses():
    with pytest.raises(ConversionError, match="ONNX Runtime refuses the model") as caught:
        Runner(b"junk")
    assert "\n" not in str(caught.value)


def test_onnx_runtimes_mark_is_left_out():
    assert reason_of(RuntimeError("[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED")) == "9 : NOT_IMPLEMENTED"
