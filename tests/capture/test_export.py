"""Capture by torch.export: the roles of inputs and outputs, the weights, and numbers equal to eager's."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import graph_signature as signature

from memopt.capture import export
from memopt.capture.export import CaptureError, from_exported_program, from_module
from memopt.program import Input, InputKind, Output, OutputKind, is_effectful
from tests.support import assert_same, run, targets

X = torch.linspace(-1, 1, 12).reshape(4, 3)


class Everything(nn.Module):
    """Tied weights, buffers of all kinds, a constant, keyword arguments, a written input and a nested result."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.second.weight = self.first.weight
        self.register_buffer("count", torch.zeros(3), persistent=False)
        self.offset = torch.tensor([1.0, 2.0, 3.0])

    def forward(self, x: torch.Tensor, scale: float = 1.0, *, extra: torch.Tensor | None = None) -> dict:
        self.count.add_(1)
        x.mul_(2)
        y = self.norm(self.second(self.first(x))) * scale + self.offset
        return {"y": y, "more": (3, None, extra)}


def test_every_input_and_output_has_its_role() -> None:
    model = Everything()
    program = from_module(model, [X.clone(), 2.0], {"extra": torch.ones(1)})
    program.check()
    roles = [(entry.kind, entry.target) for entry in program.inputs]
    parameter, buffer = InputKind.PARAMETER, InputKind.BUFFER
    assert {target for kind, target in roles if kind is parameter} == {
        *("first.weight", "first.bias", "second.weight", "second.bias", "norm.weight", "norm.bias")
    }
    assert {target for kind, target in roles if kind is buffer} == {
        *("count", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked")
    }
    assert [target for kind, target in roles if kind is InputKind.CONSTANT] == ["offset"]
    assert program.inputs[-3:] == tuple(Input(name, InputKind.USER) for name in ("x", "scale", "extra"))
    named = {entry.name: entry.target for entry in program.inputs}
    mutations = [output for output in program.outputs if output.kind is OutputKind.MUTATION]
    assert {named[output.target] or output.target for output in mutations} == {
        *("count", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "x")
    }
    assert program.outputs[len(mutations) :] == (Output(OutputKind.USER),) * 4
    assert (program.training, program.baked) == (False, frozenset())


def test_state_shares_the_models_tensors_and_drops_their_gradients() -> None:
    model = Everything()
    program = from_module(model, [X.clone()])
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    tensors["offset"] = model.offset
    for entry in program.inputs[:-1]:
        value = program.state[entry.name]
        assert value.data_ptr() == tensors[entry.target].data_ptr() and not value.requires_grad
    assert program.inputs[-1].name not in program.state and len(program.state) == len(program.inputs) - 1


def test_the_program_computes_what_eager_does_and_writes_nothing() -> None:
    torch.manual_seed(0)
    model, twin = Everything(), Everything()
    twin.load_state_dict(model.state_dict())
    program = from_module(model, [X.clone(), 2.0], {"extra": torch.ones(1)})
    given, written = X.clone(), X.clone()
    found = run(program, given, 2.0, extra=torch.ones(1))
    with torch.no_grad():
        expected = twin(written, 2.0, extra=torch.ones(1))
    assert_same(found[-4], expected["y"])
    assert found[-3:-1] == [3, None] and torch.equal(found[-1], torch.ones(1))
    new = dict(zip([output.target for output in program.outputs], found, strict=True))
    for entry in program.inputs:
        if entry.name in new and entry.target is not None:
            assert_same(new[entry.name], twin.get_buffer(entry.target))
            assert not torch.equal(model.get_buffer(entry.target), twin.get_buffer(entry.target))
    assert_same(new["x"], written)
    assert torch.equal(given, X)


def test_the_mode_of_the_model_is_captured() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(3))
    train, evaluate = from_module(model, [X]), from_module(model.eval(), [X])
    assert "aten.native_dropout.default" in targets(train)
    assert "aten._native_batch_norm_legit_functional.default" in targets(train)
    assert any(output.kind is OutputKind.MUTATION for output in train.outputs)
    assert targets(evaluate)[-1] == "aten._native_batch_norm_legit_no_training.default"
    assert evaluate.outputs == (Output(OutputKind.USER),)
    assert_same(run(evaluate, X), model(X).detach())


@pytest.mark.parametrize(
    ("model", "shape", "expected"),
    [
        (nn.Linear(3, 2), (4, 3), ["aten.t.default", "aten.addmm.default"]),
        (nn.Conv2d(2, 3, 3), (1, 2, 5, 5), ["aten.convolution.default"]),
        (nn.LayerNorm(3), (4, 3), ["aten.native_layer_norm.default"]),
        (nn.SiLU(), (4, 3), ["aten.silu.default"]),
        (nn.GELU(), (4, 3), ["aten.gelu.default"]),
        (nn.ReLU(inplace=True), (4, 3), ["aten.relu.default"]),
    ],
)
def test_composite_operators_are_decomposed_and_fused_ones_stay_whole(
    model: nn.Module, shape: tuple[int, ...], expected: list[str]
) -> None:
    x = torch.rand(shape)
    program = from_module(model, [x.clone()])
    assert targets(program) == expected
    assert not any(is_effectful(node) for node in program.calls)
    assert_same(run(program, x)[-1], model(x.clone()).detach())


def test_tensors_made_in_the_code_are_constants() -> None:
    class Made(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tensor([1.0, 2.0, 3.0])

    program = from_module(Made(), [X])
    (constant,) = [entry for entry in program.inputs if entry.kind is InputKind.CONSTANT]
    assert torch.equal(program.state[constant.name], torch.tensor([1.0, 2.0, 3.0]))
    assert_same(run(program, X), X + torch.tensor([1.0, 2.0, 3.0]))


def test_placeholders_named_like_builtins_keep_their_entries() -> None:
    program = from_module(nn.Sequential(nn.ReLU(inplace=True)), [X.clone()])
    assert [node.name for node in program.placeholders] == [entry.name for entry in program.inputs] == ["input_1"]
    assert program.outputs == (Output(OutputKind.MUTATION, "input_1"), Output(OutputKind.USER))


def test_models_that_cannot_be_exported_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if x.sum() > 0 else x

    with pytest.raises(CaptureError, match=r"torch\.export cannot capture Branch: ") as caught:
        from_module(Branch(), [X])
    assert caught.value.__cause__ is not None and "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")
    with pytest.raises(CaptureError, match=r"fixed shapes are needed"):
        batch = {"input": {0: torch.export.Dim("batch", min=2)}}
        from_exported_program(torch.export.export(nn.ReLU(), (X,), dynamic_shapes=batch))


def test_inputs_and_outputs_of_unknown_kinds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2))
    for table, kind in (
        (export._INPUT_KINDS, signature.InputKind.PARAMETER),
        (export._OUTPUT_KINDS, signature.OutputKind.USER_INPUT_MUTATION),
    ):
        with monkeypatch.context() as patch, pytest.raises(CaptureError, match=f"of kind {kind.name}, which memopt"):
            patch.delitem(table, kind)
            from_module(model, [X.clone()])
