"""`verify="full"`: the model beside its compiled call; what differs is named with the stage that made it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memopt
from memopt.backends.aten import AtenBackend
from memopt.calls.verified import ModelError
from memopt.capture import boundary
from memopt.capture.export import CaptureError
from memopt.capture.metadata import MetadataError
from memopt.pass_manager import Change, Pass, PassResult
from memopt.step import backward_entry
from memopt.torch_compat import dynamo
from tests.torch_compat.test_dynamo import Round

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


aten = torch.ops.aten
X = torch.linspace(-1, 1, 6 * 8).reshape(6, 8)


class Model(nn.Module):
    """Buffers, random numbers, a counter, a list, a tensor that is kept, and an argument that is written to."""

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.drop = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(dropout)
        self.last = nn.Linear(16, 4)
        self.register_buffer("total", torch.zeros(4))
        self.calls, self.kept, self.seen = 0, None, []

    def forward(self, x, scratch=None):
        self.calls += 1
        y = self.last(self.drop(self.norm(self.first(x)).tanh()))
        self.total.add_(y.detach().sum(0))
        self.kept = y.detach() * 2
        if scratch is not None:
            scratch.copy_(y.detach())
        return {"loss": y.square().sum(), "parts": (y.t(), y.detach()), "size": len(x)}


class Plain(nn.Module):
    def __init__(self, call) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.call, self.linear = call, nn.Linear(8, 8)

    def forward(self, x):
        return self.call(self.linear, x)


@pytest.mark.quick("True")
@pytest.mark.parametrize("training", [True, False])
def test_the_call_leaves_what_one_call_of_the_model_leaves(training):
    found = []
    for make in (lambda model: model, lambda model: memopt.compile(model, backend="aten", verify="full")):
        model, scratch, x = Model().train(training), torch.zeros(6, 4), X.clone().requires_grad_(training)
        run = make(model)
        torch.manual_seed(7)
        with torch.set_grad_enabled(training):
            for _ in range(2):
                outputs = run(x, scratch=scratch)
        if training:
            outputs["loss"].backward()
        state = [*model.buffers(), model.kept, scratch, torch.rand(3), model.calls, *outputs["parts"]]
        found.append([state, [parameter.grad for parameter in model.parameters()], x.grad])
    torch.testing.assert_close(*found)


@pytest.mark.quick("integers", "gradients_that_cancel", "views")
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(Model(0.0).bfloat16(), id="bf16"),
        pytest.param(Model(0.0).double(), id="float64"),
        pytest.param(Plain(lambda linear, x: linear(x).unfold(1, 2, 2).sum(-1)), id="views"),
        pytest.param(Plain(lambda linear, x: torch.vmap(lambda row: Round.apply(linear(row)))(x)), id="vmap"),
        pytest.param(Plain(lambda linear, x: (linear(x)[:, :4], linear(x).argmax(1), None, 3)), id="integers"),
        pytest.param(Plain(lambda linear, x: linear(x).softmax(1).sum()), id="gradients_that_cancel"),
    ],
)
@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be instantiated")
def test_no_false_alarms(model):
    dtype = next(model.parameters()).dtype
    compiled = memopt.compile(model, backend="aten", verify="full")
    compiled(X.to(dtype))
    with torch.no_grad():
        compiled(X[:2].to(dtype))


LOST = {
    "write": lambda linear, x: _written(linear(x) * 1).square().sum(),
    "vmap": lambda linear, x: torch.vmap(lambda row: Round.apply(4 * linear(row)))(x).sum(),
}


class Overwriting(nn.Module):
    """Writes to what the gradient of its first output needs: a loss may use the second one only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.first(x).sin()
        larger = torch.maximum(hidden, x)
        hidden.lerp_(x, 0.3)
        return larger, self.second(x)


def test_a_model_without_the_gradients_of_all_its_outputs_is_verified():
    model, x = Overwriting(), torch.randn(3, 4)
    memopt.compile(model, backend="aten", verify="full")(x)[1].sum().backward()
    assert model.first.weight.grad is None and model.second.weight.grad is not None


def _written(y):
    y.unfold(1, 1, 7).mul_(2)
    return y


@pytest.mark.parametrize("name", list(LOST))
@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be instantiated")
def test_what_torch_s_capture_makes_wrong_is_found_without_the_mends(name, monkeypatch):
    monkeypatch.setattr(boundary, "refuse_lost_writes", lambda graph_module: None)
    monkeypatch.setattr(dynamo, "_loses_backward", lambda *_: False)
    compiled = memopt.compile(Plain(LOST[name]), backend="aten", verify="full")
    with pytest.raises(ModelError, match=r"Plain and its captured program differ: (output 0|gradient of)") as error:
        compiled(X)
    assert error.value.stage == "captured program" and "\n" not in str(error.value)


def test_gradients_that_vanish_in_emitted_code_are_found_without_the_mend(monkeypatch):
    monkeypatch.setattr(boundary, "views_outside", lambda graph_module: None)
    for module in ("forward_backward", "recalled"):  # these results are apart in the end, too
        monkeypatch.setattr(f"memopt.inductor.{module}.writable", lambda run, in_part=tuple: run)
    model = Plain(lambda linear, x: (lambda y: (y[:, :4], y[:, 4:], y.detach()))(linear(x).sin()))
    with pytest.raises(ModelError, match="gradient of linear") as error:
        memopt.compile(model, backend="inductor", verify="full")(X)
    assert error.value.stage == "emitted code"


@pytest.mark.quick("aten")
@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_gradients_of_zeros_of_a_head_that_a_loss_does_not_use_are_found_without_the_mend(backend, monkeypatch):
    """AOTAutograd returns zeros where eager has none: AdamW would decay such a head."""
    head = nn.Linear(8, 2)
    model = Plain(lambda linear, x: (linear(x).sum(), head(x).sum(), x.sum()))
    model.head = head
    memopt.compile(model, backend="aten", verify="full")(X)[0].backward()
    assert head.weight.grad is None
    torch._dynamo.reset()
    monkeypatch.setattr(backward_entry._Entry, "_without", lambda self, missing: [])
    with pytest.raises(ModelError, match=r"gradient of \S+ by output \d+ alone is a tensor, not None"):
        memopt.compile(model, backend=backend, verify="full")(X)


class Sine(Pass):
    """Takes tanh for sin."""

    name = "sine"
    tolerance = 2.0

    def run(self, program):
        new = program.copy()
        for node in new.calls:
            if node.target is aten.tanh.default:
                node.target = aten.sin.default
        return PassResult(new.finish(), (Change("wrong", (), ()),))


def test_a_pass_is_named_as_the_stage(monkeypatch):
    monkeypatch.setattr("memopt.pass_manager.prove", lambda *args: None)
    model = Plain(lambda linear, x: linear(x).tanh())
    with torch.no_grad(), pytest.raises(ModelError, match="Plain and its passes differ: output 0 differs by") as error:
        memopt.compile(model, backend="aten", passes=(Sine(),), verify="full")(X)
    assert error.value.stage == "passes"


class Wrong(AtenBackend):
    """Does something to what the graph returns."""

    def __init__(self, change) -> None:
        self.change = change

    def compile_captured(self, graph_module, example_inputs, hooks):
        run = super().compile_captured(graph_module, example_inputs, hooks)
        return lambda *args: [self.change(value) for value in run(*args)]


def drawn(value):
    torch.rand(1)
    return value


FAULTS = {
    "values": (lambda value: value * 1.001, "output 0 differs by"),
    "random": (drawn, "random numbers drawn after the call are others"),
    "not_a_number": (lambda value: value / 0 * 0, "output 0 is not a number in other places"),
}


@pytest.mark.quick("values")
@pytest.mark.parametrize("name", FAULTS)
def test_code_is_named_as_the_stage(name):
    change, message = FAULTS[name]
    model = Plain(lambda linear, x: linear(x).tanh())
    with pytest.raises(ModelError, match=message) as error:
        memopt.compile(model, backend=Wrong(change), verify="full")(X)
    assert error.value.stage == "emitted code"


METADATA = {
    "gradient": (lambda value: value.detach(), "output 0 has no gradient, and has one in the model"),
    "shape": (lambda value: value[:1], "output 0 has shape"),
    "dtype": (lambda value: value.double(), "output 0 has dtype torch.float64, and torch.float32 in the model"),
    "strides": (lambda value: value.t().contiguous().t(), "output 0 has strides"),
    "memory": (lambda value: value.clone(), "output 0 and output 1 share no memory, and do in the model"),
}


@pytest.mark.quick("gradient", "strides")
@pytest.mark.parametrize("name", METADATA)
def test_by_default_what_outputs_are_is_compared(name):
    change, message = METADATA[name]
    model = Plain(lambda linear, x: (lambda y: (y, y[1:]))(linear(x).tanh()))
    compiled = memopt.compile(model, backend=Wrong(change))
    with pytest.raises(MetadataError, match=message) as error:
        compiled(X)
    assert "test_verified.py:" in str(error.value) or name == "memory"
    torch._dynamo.reset()
    memopt.compile(model, backend=Wrong(change), verify=False)(X)


def test_such_a_difference_of_memopt_s_own_engine_is_a_failure_inside_memopt(monkeypatch):
    real = AtenBackend.compile_captured

    def detached(self, graph_module, example_inputs, hooks):
        run = real(self, graph_module, example_inputs, hooks)
        return lambda *args: [value.detach() for value in run(*args)]

    monkeypatch.setattr(AtenBackend, "compile_captured", detached)
    model = Plain(lambda linear, x: linear(x).tanh())
    compiled = memopt.compile(model, backend="aten")
    outputs = compiled(X)
    assert outputs.requires_grad and any("has no gradient" in note for note in compiled.report.notes)
    torch._dynamo.reset()
    with pytest.raises(CaptureError, match="has no gradient"):
        memopt.compile(model, "1MB", backend="aten")(X)


class Writes(nn.Module):
    """Writes to its input, and reads it afterwards."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)

    def forward(self, x, y):
        x.mul_(y)
        x[torch.tensor([0, -1])] = y[0]
        return self.linear(x).sin(), torch.as_strided(x, (3, 2), (1, 1))


GIVEN = {
    "a leaf": lambda w: X.clone(),
    "computed": lambda w: w * 2,
    "a view": lambda w: (w * 2).t().contiguous().t(),
    "a view of what is computed": lambda w: (w * 2)[1:],
}


@pytest.mark.parametrize("name", GIVEN)
def test_what_a_written_argument_was_computed_of_is_returned_to(name):
    found = []
    for compiled in (False, True):
        model, w = Writes(), X.clone().requires_grad_()
        call = memopt.compile(model, backend="aten", verify="full") if compiled else model
        for _ in range(2):
            w.grad, x = None, GIVEN[name](w)
            y = (torch.ones_like(x) * 1.5).requires_grad_()
            outputs = call(x, y)
            (sum(out.sum() for out in outputs) + x.square().sum()).backward()
            found.append([*outputs, x, y.grad, w.grad, model.linear.weight.grad])
    for expected, value in zip(found[:2], found[2:], strict=True):
        torch.testing.assert_close(value, expected)


@pytest.mark.quick("aten")
@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_calls_before_one_backward_are_verified(backend):
    """The second call is of another kind once two are planned together: what the first has saved is left alone."""
    found = []
    for compiled in (False, True):
        model = Plain(lambda linear, x: linear(linear(x).sin()))
        call = memopt.compile(model, backend=backend, verify="full") if compiled else model
        for size in (6, 3):
            (call(X[:size]).sum() + call(X[:4]).square().sum()).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*found)


def test_checkpoints_that_are_entered_again_are_compared_by_what_backward_leaves():
    model = Plain(lambda layer, x: x + checkpoint(layer, x.sin() * layer.bias, use_reentrant=True))
    call = memopt.compile(model, backend="aten", verify="full")
    call(X).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
