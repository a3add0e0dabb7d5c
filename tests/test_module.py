"""Attributes of the stand-in are the model's: read, set and deleted, with effect from the next call on."""

import copy
import inspect
import pickle
import types

import pytest
import torch
from torch import nn

import memopt
from memopt.capture.export import CaptureError

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 8), 1.0

    def forward(self, x):
        return self.layer(x) * self.scale


class Net(nn.Module):
    """Has attributes of every kind, and such that a stand-in could take for its own."""

    def __init__(self):
        super().__init__()
        self.encoder, self.head = Encoder(), nn.Linear(8, 4)
        self.scale, self.flag, self.settings, self.offset = 1.0, False, {"power": 1}, None
        self.report, self.plan, self._options, self._gradients, self._model = 1.0, 1.0, 1.0, 1.0, 1.0
        self._gain = 1.0
        self.register_buffer("shift", torch.zeros(4))

    @property
    def gain(self):
        return self._gain

    @gain.setter
    def gain(self, value):
        self._gain = value / 2

    def forward(self, x):
        y = self.head(self.encoder(x)) * self.scale * self.gain + self.shift
        if self.flag:
            y = y.tanh()
        if self.offset is not None:
            y = y + self.offset
        if hasattr(self, "extra"):
            y = self.extra(y)
        return y ** self.settings["power"] * (self.report + self.plan + self._options + self._gradients + self._model)


def changes():
    """What a user sets, one after the other: functions of the model or of its stand-in."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    return {
        "nothing": lambda m: None,
        "float": lambda m: setattr(m, "scale", 3.0),
        "flag": lambda m: setattr(m, "flag", True),
        "nested": lambda m: setattr(m.encoder, "scale", 2.0),
        "tensor": lambda m: setattr(m, "offset", random(4)),
        "another tensor": lambda m: setattr(m, "offset", random(4)),
        "property": lambda m: setattr(m, "gain", 3.0),
        "entry": lambda m: m.settings.update(power=2),
        "parameter": lambda m: setattr(m.head, "weight", nn.Parameter(random(4, 8))),
        "module": lambda m: setattr(m, "head", linear(random(4, 8))),
        "new module": lambda m: setattr(m, "extra", linear(random(4, 4))),
        "added module": lambda m: m.extra.add_module("unused", linear(random(4, 4))),
        "buffer": lambda m: setattr(m, "shift", random(4)),
        "registered": lambda m: (m.__delattr__("shift"), m.register_buffer("shift", random(4), persistent=False)),
        "deleted": lambda m: m.__delattr__("extra"),
        "report": lambda m: setattr(m, "report", 2.0),
        "plan": lambda m: setattr(m, "plan", 2.0),
        "options": lambda m: setattr(m, "_options", 2.0),
        "gradients": lambda m: setattr(m, "_gradients", 2.0),
        "model": lambda m: setattr(m, "_model", 2.0),
        "method": lambda m: setattr(m.encoder, "forward", types.MethodType(sine, m.encoder)),
        "mode": lambda m: setattr(m, "training", False),
    }


def sine(self, x):
    return self.layer(x).sin()


def linear(weight):
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight)
    return layer


def result(run, model, x, training):
    """What a call gives, with the gradients of the model's parameters in training."""
    model.zero_grad()
    with torch.set_grad_enabled(training):
        y = run(x)
    if training:
        y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "training", "budget"),
    [("aten", True, None), ("aten", True, "1MB"), ("aten", False, "1MB"), ("static", False, None)],
)
def test_what_is_set_on_the_stand_in_reaches_the_model(backend, training, budget):
    torch.manual_seed(0)
    model = Net().train(training)
    twin = copy.deepcopy(model)
    run = memopt.compile(model, budget, backend=backend)
    x = torch.randn(3, 8)
    tolerance = 0.0 if backend == "aten" and training else 1e-5
    for (name, change), of_twin in zip(changes().items(), changes().values(), strict=True):
        change(run)
        of_twin(twin)
        for _ in range(3):  # planned, seen again, and by the guard fast path
            found, wanted = result(run, model, x, training), result(twin, twin, x, training)
            torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance, msg=f"not so after: {name}")
    assert list(run.state_dict()) == list(twin.state_dict()) and run.training is twin.training is False
    assert run.scale == 3.0 and run._options == 2.0 and run.gain == 1.5 and isinstance(run.report, memopt.Report)
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'extra'"):
        _ = run.extra


# -- moves and casts --------------------------------------------------------------------------------------------------


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(6, 8)


@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.to("cpu"),
        lambda m: m.cpu().float(),
        lambda m: m.to(torch.float32, memory_format=torch.preserve_format),
        lambda m: m.requires_grad_(),
        lambda m: m.eval().train(),
        lambda m: m.apply(lambda part: None),
    ],
)
def test_what_moves_nothing_keeps_plans_and_report(move, monkeypatch):
    model, x = small()
    run = memopt.compile(model, "1MB", backend="aten")
    run(x).sum().backward()
    run.zero_grad()
    report = run.report
    assert move(run) is run and run.report is report
    monkeypatch.delattr("memopt.compilation.session.Session.plan_training")
    run(x).sum().backward()
    assert run.report is report


@pytest.mark.quick("model-there_and_back0", "stand-in-there_and_back1")
@pytest.mark.parametrize("there_and_back", [(torch.float64, torch.float32), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("by", ["stand-in", "model"])
def test_what_is_cast_is_planned_anew_and_the_report_stays_until_then(there_and_back, by):
    model, x = small()
    run = memopt.compile(model, "1MB", backend="aten")
    run(x)
    for dtype in there_and_back:
        report = run.report
        (run if by == "stand-in" else model).to(dtype)
        assert run.report is report
        found = result(run, model, x.to(dtype), True)
        expected = result(model, model, x.to(dtype), True)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        known = by == "model" and dtype == torch.float32  # its first plan is still there
        assert (run.report is report) == known


def test_parameters_that_are_frozen_or_replaced_are_planned_anew():
    model, x = small()
    run = memopt.compile(model, "1MB", backend="aten")
    for change in (
        lambda: None,
        lambda: run[0].requires_grad_(False),
        lambda: run.requires_grad_(True),
        lambda: setattr(run[3], "weight", nn.Parameter(torch.ones(4, 8))),
        lambda: run.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}, assign=True),
        lambda: run.requires_grad_(False).__getitem__(3).requires_grad_(True),
    ):
        change()
        for _ in range(3):
            torch.testing.assert_close(result(run, model, x, True), result(model, model, x, True), rtol=0, atol=0)


# -- methods of the model's own ---------------------------------------------------------------------------------------


class Overriding(nn.Module):
    """Changes methods that every module has, as frameworks do."""

    def __init__(self):
        super().__init__()
        self.layer, self.hidden = nn.Linear(8, 8), nn.Linear(8, 8)
        self.evaluated = 0

    def parameters(self, recurse=True):
        return iter([self.layer.weight, self.layer.bias])

    def eval(self):
        self.evaluated += 1
        return super().eval()

    def forward(self, x):
        return self.layer(x)


def test_methods_that_the_model_changes_are_the_model_s():
    run = memopt.compile(Overriding(), backend="aten")
    assert len(list(run.parameters())) == 2
    assert run.eval() is run and run.evaluated == 1 and not run.training and not run.layer.training
    seen = []
    run.apply(lambda part: seen.append(type(part)))
    assert seen == [nn.Linear, nn.Linear, Overriding]
    assert {"layer", "evaluated", "report", "forward"} <= set(dir(run))
    with pytest.raises(TypeError, match="compiled by memopt already"):
        run.compile()


def test_a_shallow_copy_has_attributes_of_its_own():
    run = memopt.compile(Encoder(), backend="aten")
    twin = copy.copy(run)
    twin.scale = 2.0
    x = torch.randn(2, 8)
    assert run.scale == 1.0 and twin.layer is run.layer
    torch.testing.assert_close(twin(x), 2 * run(x))


@pytest.mark.parametrize("model", [Encoder(), nn.ModuleList([Encoder()])])
def test_libraries_that_name_a_class_by_its_object_name_the_model_s(model):
    run = memopt.compile(model, backend="aten")
    for each in (run, copy.deepcopy(run), pickle.loads(pickle.dumps(run))):
        assert (each.__module__, each.__class__.__name__) == (type(model).__module__, type(model).__name__)


@pytest.mark.parametrize("budget", ["1MB", None])
def test_a_forward_that_does_not_call_the_stand_in_s_own_is_refused_or_said(budget, caplog):
    """As TRL's trainers replace it: nothing of the call would be planned."""
    run, x = memopt.compile(Encoder(), budget, backend="aten"), torch.randn(2, 8)
    run.forward = types.MethodType(lambda self, x: self.layer(x), run)
    if budget is None:
        run(x), run(x)
        assert [record.message.count("was replaced by one that does not call it") for record in caplog.records] == [1]
    else:
        with pytest.raises(CaptureError, match="MemoptCallback"):
            run(x)
    del run.forward
    own = run.forward
    run.forward = types.MethodType(lambda self, x: 2 * own(x), run)
    torch.testing.assert_close(run(x), 2 * own(x))
    run.forward = own  # as accelerate takes its own away
    assert not run._forward_hooks


def test_a_forward_that_was_wrapped_around_the_stand_in_s_own_stays_there():
    run = memopt.compile(Encoder(), backend="aten")
    x, own = torch.randn(2, 8), run.forward
    expected = run(x)
    run.forward = lambda x: 2 * own(x)
    torch.testing.assert_close(run(x), 2 * expected)
    del run.forward
    torch.testing.assert_close(run(x), expected)


# -- what libraries ask of a model ------------------------------------------------------------------------------------


class Base(nn.Module):
    def forward(self, inputs, labels=None, **more):
        return {"loss": self.layer(inputs).square().mean(), "given": labels is not None, **more}


class Labelled(Base):
    """Has arguments that callers choose among."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)


def test_the_stand_in_is_an_instance_of_the_model_s_own_class_and_signed_as_it():
    model = Labelled()
    run = memopt.compile(model, backend="aten")
    for made in (run, copy.copy(run), copy.deepcopy(run), pickle.loads(pickle.dumps(run))):
        assert isinstance(made, Labelled) and isinstance(made, Base) and isinstance(made, memopt.CompiledModule)
        assert made.__class__ is Labelled and made._get_name() == "Labelled"
        assert inspect.signature(made.forward) == inspect.signature(model.forward)
        assert not isinstance(made, Encoder) and type(made) is type(run) and type(made).__name__ == "CompiledModule"
    x = torch.randn(2, 8)
    found, expected = run(x, labels=x, extra=1), model(x, labels=x, extra=1)
    assert found.keys() == expected.keys() and found["given"] and found["extra"] == 1
    torch.testing.assert_close(found["loss"], expected["loss"], rtol=0, atol=0)
    assert list(inspect.signature(memopt.compile(Encoder(), backend="aten").forward).parameters) == ["args", "kwargs"]


def test_a_parametrization_of_the_stand_in_is_one_of_the_model():
    model = nn.Linear(8, 8)
    run, twin = memopt.compile(model, backend="aten"), copy.deepcopy(model)
    x = torch.randn(2, 8)
    run(x)
    for layer in (run, twin):
        nn.utils.parametrizations.weight_norm(layer)
    assert isinstance(run, memopt.CompiledModule) and isinstance(run, nn.Linear)
    assert torch.nn.utils.parametrize.is_parametrized(model) and torch.nn.utils.parametrize.is_parametrized(run)
    assert [name for name, _ in run.named_parameters()] == [name for name, _ in twin.named_parameters()]
    torch.testing.assert_close(result(run, model, x, True), result(twin, twin, x, True), rtol=0, atol=0)


def test_a_signature_that_python_cannot_tell_leaves_the_stand_in_s_own(monkeypatch):
    class Odd(nn.Module):
        forward = dict.get  # has none

    assert inspect.signature(memopt.compile(Odd(), backend="aten").forward).parameters


def test_a_refused_call_has_a_short_traceback():
    """Its line is to be read: some hundred of Dynamo's frames are not, and their tensors are not held either."""
    compiled = memopt.compile(nn.Linear(64, 64), "10kB", backend="aten")
    with pytest.raises(memopt.BudgetError) as refused:
        compiled(torch.randn(64, 64)).sum()
    files = [str(entry.path) for entry in refused.traceback]
    assert len(files) < 6 and not any("_dynamo" in name or "_functorch" in name for name in files)
    assert refused.value.__suppress_context__ and refused.value.__context__ is None
