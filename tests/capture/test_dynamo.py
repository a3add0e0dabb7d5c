"""The front door: what Hooks learn from Dynamo's graphs, and functions that notice when a folded weight changes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt.backends.aten import AtenBackend, emit, lower_inference
from memopt.capture.dynamo import Hooks, Watched
from memopt.capture.graph_inputs import Known
from memopt.capture.joint import Origin, constants_to_attributes
from memopt.capture.shadow import model_names
from memopt.passes.fold_constants import FoldConstants
from memopt.program import InputKind, OutputKind, Program
from memopt.step.call_role import CallRole
from memopt.step.plan_request import PlanRequest
from tests.passes.build import trace
from tests.support import assert_same

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


X = torch.linspace(-1, 1, 12).reshape(4, 3)


class Recorder:
    """A session that keeps what it is given, and is a Dynamo backend."""

    role = CallRole()

    dry = False
    early = None

    def __init__(self, names: dict | None = None) -> None:
        self._names = names or {}
        self.hooks: list[Hooks] = []
        self.programs: list[Program] = []
        self.breaks: list[bool] = []

    def names(self) -> dict:
        return self._names

    def training(self, program: Program, graph_break: bool, request: PlanRequest | None) -> Program:
        self.breaks.append(graph_break)
        return self.inference(program)

    def inference(self, program: Program) -> Program:
        assert not torch.is_grad_enabled() and type(torch.ones(1) + 1) is torch.Tensor  # real, not fake
        assert not torch.is_autocast_enabled("cpu")
        program.check()
        self.programs.append(program)
        return program

    def __call__(self, graph_module: torch.fx.GraphModule, example_inputs: list) -> Any:
        self.hooks.append(Hooks(self, graph_module, example_inputs))
        return AtenBackend().compile_captured(graph_module, example_inputs, self.hooks[-1])

    def compile(self, model: Any) -> Any:
        return torch.compile(model, backend=self, dynamic=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList([nn.Linear(3, 3)]), nn.BatchNorm1d(3)
        self.gain, self.table = nn.Parameter(torch.full((3,), 2.0)), torch.ones(3)
        self.register_buffer("shift", torch.arange(3.0))

    def forward(self, x: torch.Tensor, k: float) -> torch.Tensor:
        return self.norm(self.layers[0](x)) * self.gain + self.table * k + self.shift


TARGETS = {
    (InputKind.PARAMETER, "layers.0.weight"),
    (InputKind.PARAMETER, "layers.0.bias"),
    (InputKind.PARAMETER, "norm.weight"),
    (InputKind.PARAMETER, "norm.bias"),
    (InputKind.PARAMETER, "gain"),
    (InputKind.BUFFER, "norm.running_mean"),
    (InputKind.BUFFER, "norm.running_var"),
    (InputKind.BUFFER, "norm.num_batches_tracked"),
    (InputKind.BUFFER, "shift"),
}


def owned(entries: Any) -> set:
    return {(entry.kind, entry.target) for entry in entries if entry.target is not None}


@pytest.mark.parametrize("known", [False, True])
def test_weights_are_known_by_name_and_value_in_training(known: bool) -> None:
    model = Model()
    twin = Model()
    twin.load_state_dict(model.state_dict())
    session = Recorder(model_names(model) if known else None)
    result = session.compile(model)(X, 0.5)
    result.sum().backward()
    expected = twin(X, 0.5)
    expected.sum().backward()
    assert_same(result.detach(), expected.detach())
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert_same(one.grad, other.grad)
    assert_same(dict(model.named_buffers()), dict(twin.named_buffers()))
    (hooks,), (program,) = session.hooks, session.programs
    assert owned(hooks.origins) == owned(program.inputs) == TARGETS
    assert hooks.needs_gradients and not hooks.graph_break and not hooks.dry and program.training
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for entry in program.inputs:
        if entry.target is not None:
            assert program.state[entry.name].data_ptr() == tensors[entry.target].data_ptr()
    names = {entry.name: entry.target for entry in program.inputs}
    gradients = [names[o.target] for o in program.outputs if o.kind is OutputKind.GRADIENT]
    assert sorted(gradients) == sorted(name for kind, name in TARGETS if kind is InputKind.PARAMETER)


def test_names_given_for_a_tensor_win() -> None:
    model = nn.Linear(3, 2)
    real = torch.ones(2, 3)
    session = Recorder({id(model.weight): Known(InputKind.BUFFER, "another", real)})
    session.compile(model)(X)
    assert (InputKind.BUFFER, "another") in owned(session.hooks[0].origins)
    (origin,) = [origin for origin in session.hooks[0].origins if origin.target == "another"]
    assert origin.value.data_ptr() == real.data_ptr()


def test_inference_programs_are_those_of_no_grad_and_frozen_models() -> None:
    model = Model().eval()
    for frozen in (False, True):
        session = Recorder()
        with torch.set_grad_enabled(frozen):
            result = session.compile(model.requires_grad_(not frozen))(X, 0.5)
        assert_same(result, model(X, 0.5).detach())
        (hooks,), (program,) = session.hooks, session.programs
        assert not hooks.needs_gradients and not program.training and session.breaks == []
        torch._dynamo.reset()


def test_an_inference_graph_may_be_asked_for_again() -> None:
    """As where what was made of it takes more than the budget: its constants stay constants."""
    session, seen = Recorder(), []

    def twice(graph_module: torch.fx.GraphModule, example_inputs: list) -> Any:
        hooks = Hooks(session, graph_module, example_inputs)

        def inference(module: torch.fx.GraphModule, _: Any) -> Any:
            seen.extend(hooks.inference(module)[0] for _ in range(2))
            return emit(constants_to_attributes(seen[-1]))

        return lower_inference(graph_module, example_inputs, inference)

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor([1.0, 2.0, 3.0])

    with torch.no_grad():
        assert_same(torch.compile(function, backend=twice)(X), function(X))
    first, second = seen
    assert {entry.kind for entry in first.inputs} == {InputKind.USER, InputKind.CONSTANT}
    assert second.inputs == first.inputs


def test_numbers_and_plain_tensors_are_the_users() -> None:
    session = Recorder()
    session.compile(lambda x, y: x * 2 + y)(X, torch.ones(3, requires_grad=True))
    assert session.hooks[0].origins == [Origin(InputKind.USER, None, None)] * 2
    assert session.hooks[0].needs_gradients


@pytest.mark.parametrize("kind", [nn.Embedding, functools.partial(nn.EmbeddingBag, mode="sum")], ids=["one", "bag"])
def test_sparse_gradients_are_refused_in_one_line(kind) -> None:
    embedding = kind(5, 3, sparse=True)
    with pytest.raises(
        memopt.CaptureError, match=r"^\S+ \(.+\) is a torch.sparse_coo tensor: only strided.* sparse=False"
    ):
        memopt.compile(embedding, backend="aten")(torch.tensor([[1, 2]])).sum().backward()


def test_graph_breaks_are_seen() -> None:
    def broken(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x * w).sin()
        torch._dynamo.graph_break()
        return y.cos()

    session = Recorder()
    w = torch.ones(3, requires_grad=True)
    result = session.compile(broken)(X, w)
    result.sum().backward()
    assert len(session.programs) == 2 and session.breaks[0] is True
    assert_same(w.grad, (-torch.sin(X.sin()) * X.cos() * X).sum(0), rtol=1e-5, atol=1e-6)


def test_autocast_is_in_the_program_and_not_around_the_session() -> None:
    session = Recorder()
    model = nn.Linear(3, 2)
    with torch.autocast("cpu", torch.bfloat16):
        result = session.compile(model)(X)
        expected = model(X)
    assert result.dtype is torch.bfloat16
    assert_same(result.detach(), expected.detach())


def test_tensors_whose_changes_cannot_be_seen_have_no_known_value() -> None:
    with torch.inference_mode():
        model = nn.Linear(3, 2)
        session = Recorder()
        result = session.compile(model)(X)
        assert_same(result, model(X))
    assert [origin.kind for origin in session.hooks[0].origins].count(InputKind.PARAMETER) == 2
    assert all(origin.value is None for origin in session.hooks[0].origins)
    assert session.programs[0].state == {}


# -- folded weights -------------------------------------------------------------------------------------------------


class Folded:
    """x * sin(w) with sin(w) folded, and how often it was folded."""

    def __init__(self) -> None:
        self.w = torch.tensor([1.0, 2.0, 3.0])
        self.program = trace(lambda x, w: (x * w.sin(),), X, self.w, kinds={1: InputKind.PARAMETER})
        self.folds: list[dict[str, torch.Tensor]] = []
        self.watched = Watched(self.fold({}), self.fold, emit)

    def fold(self, state: dict[str, torch.Tensor], trained: bool = False) -> Program:
        self.folds.append(state)
        folded = FoldConstants().run(dataclasses.replace(self.program, state={**self.program.state, **state})).program
        assert folded.baked == {"w_1"} and len(folded.calls) == 1
        return folded

    def __call__(self, w: torch.Tensor) -> torch.Tensor:
        arguments = [X, w]
        (found,) = self.watched(arguments)
        assert arguments == []
        return found


def test_unchanged_weights_are_folded_once() -> None:
    folded = Folded()
    for _ in range(3):
        assert_same(folded(folded.w), X * folded.w.sin())
    assert folded.folds == [{}]


def test_changed_and_replaced_weights_are_folded_anew() -> None:
    folded = Folded()
    folded.w.mul_(2)
    assert_same(folded(folded.w), X * torch.tensor([2.0, 4.0, 6.0]).sin())
    assert len(folded.folds) == 2 and folded.folds[1]["w_1"].data_ptr() == folded.w.data_ptr()
    other = nn.Parameter(torch.zeros(3))
    with torch.no_grad():
        other.copy_(torch.tensor([5.0, 6.0, 7.0]))
    assert other._version == folded.w._version
    assert_same(folded(other), X * torch.tensor([5.0, 6.0, 7.0]).sin())
    assert len(folded.folds) == 3 and not folded.folds[2]["w_1"].requires_grad
    optimizer = torch.optim.SGD([other], lr=1.0)
    other.grad = torch.ones(3)
    optimizer.step()
    assert_same(folded(other), X * torch.tensor([4.0, 5.0, 6.0]).sin())
    folded(other)
    assert len(folded.folds) == 4
