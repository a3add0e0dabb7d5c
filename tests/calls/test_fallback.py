"""What fails inside memopt: without a budget the model runs eagerly, with one it is refused in one line."""

import copy
import logging
import queue
import re

import pytest
import torch
from torch import nn

import memopt
import memopt.passes.eliminate_copies
from memopt.capture.export import CaptureError

pytestmark = pytest.mark.usefixtures("own_caches")


class Net(nn.Module):
    """Has buffers that forward writes, and random numbers."""

    def __init__(self, broken=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.dropout, self.broken = nn.Dropout(0.3), broken

    def forward(self, x):
        y = self.dropout(self.norm(self.first(x)))
        if self.broken:
            torch._dynamo.graph_break()
        return self.second(y.tanh())


class Planted(Exception):
    """Not an error of anybody's."""


def fail(*args, **kwargs):
    raise Planted("a planted fault\nwith two lines")


def plant(monkeypatch, where):
    """A fault in a pass, in the planner, in an engine, in capturing, or in torch's compiler."""
    if where == "pass":
        monkeypatch.setattr(memopt.passes.eliminate_copies.EliminateCopies, "run", fail)
    elif where == "planner":
        monkeypatch.setattr("memopt.compilation.session.Session.plan_training", fail)
        monkeypatch.setattr("memopt.compilation.session.plan_inference", fail)
    elif where == "engine":
        monkeypatch.setattr("memopt.backends.aten.AtenBackend.compile_captured", fail)
    elif where == "capture":
        monkeypatch.setattr("memopt.calls.tracing.Hooks", fail)
    elif where == "compiler":
        monkeypatch.setattr("torch._dynamo.output_graph.OutputGraph.compile_and_call_fx_graph", fail)


X = torch.linspace(-1, 1, 48).reshape(6, 8)
CASES = [
    *((where, True, False) for where in ("pass", "planner", "engine", "capture", "compiler")),
    ("planner", True, True),
    ("planner", False, False),
    ("engine", False, True),
]


def stepped(run, model, training=True):
    torch.manual_seed(3)
    model.zero_grad()
    with torch.set_grad_enabled(training):
        y = run(X)
    if training:
        y.square().sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [y.detach(), torch.rand(2), *gradients, *(b.clone() for b in model.buffers())]


@pytest.mark.quick("capture-True-False", "compiler-True-False", "planner-False-False", "pass-True-False")
@pytest.mark.parametrize(("where", "training", "broken"), CASES)
def test_without_a_budget_the_model_runs_eagerly(where, training, broken, monkeypatch, caplog, tmp_path):
    model, twin = (Net(broken).train(training) for _ in range(2))
    run = memopt.compile(model, backend="aten")
    with monkeypatch.context() as planted, caplog.at_level(logging.WARNING, "memopt"):
        plant(planted, where)
        for _ in range(3):
            torch.testing.assert_close(stepped(run, model, training), stepped(twin, twin, training), rtol=0, atol=0)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "a planted fault" in line and "run eagerly" in line and "\n" not in line
    (file,) = (tmp_path / "failures").iterdir()
    assert str(file) in line
    text = file.read_text()
    assert "Traceback" in text and torch.__version__ in text and "with two lines" in text
    if where in ("pass", "planner", "engine") and not broken:
        assert "class GraphModule" in text
    with pytest.raises(RuntimeError, match="a planted fault"):
        _ = run.report
    stepped(run, model, training)  # not tried again
    with torch.set_grad_enabled(training):
        run(X[:4])  # another call is
    assert any("a planted fault" in note for note in run.report.notes)
    other = memopt.compile(Net(broken).train(training), "1MB", backend="aten")
    twin = Net(broken).train(training)
    torch.testing.assert_close(stepped(other, other, training), stepped(twin, twin, training), rtol=1e-5, atol=1e-6)


@pytest.mark.quick("capture-True-False", "compiler-True-False", "engine-True-False", "pass-True-False")
@pytest.mark.parametrize(("where", "training", "broken"), CASES)
def test_with_a_budget_it_is_refused_in_one_line(where, training, broken, monkeypatch):
    model = Net(broken).train(training)
    before = copy.deepcopy(model.state_dict())
    run = memopt.compile(model, "1MB", backend="aten")
    with monkeypatch.context() as planted:
        plant(planted, where)
        for _ in range(2):
            with pytest.raises(memopt.CaptureError, match="a planted fault") as caught:
                stepped(run, model, training)
            assert "\n" not in str(caught.value) and "Net cannot be held to a budget" in str(caught.value)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    with torch.set_grad_enabled(training):
        run(X[:4])
    assert run.report.budget_bytes == 10**6


class Raises(Net):
    """Raises by its input's sizes: in Python, in an operator, or by values."""

    def forward(self, x):
        if x.shape[0] == 3:
            raise LookupError("three")
        if x.shape[0] == 5:
            y = x @ x
        elif x.shape[0] == 7:
            y = self.second.weight[:, x.long().clamp(100, 200)]
        else:
            y = super().forward(x)
        return y


@pytest.mark.quick("True-1MB", "True-1.0", "False-None")
@pytest.mark.parametrize("budget", [None, "1MB", 1.0])
@pytest.mark.parametrize("training", [True, False])
def test_the_model_s_own_error_is_raised_as_it_raises_it(budget, training):
    model, twin = (Raises().train(training) for _ in range(2))
    before = copy.deepcopy(model.state_dict())
    run = memopt.compile(model, budget, backend="aten")
    with torch.set_grad_enabled(training):
        for rows in (3, 5, 7, 3, 5):
            x = torch.ones(rows, 8)
            with pytest.raises((LookupError, RuntimeError)) as expected:
                twin(x)
            with pytest.raises(type(expected.value)) as found:
                run(x)
            assert str(found.value) == str(expected.value) and type(found.value) is type(expected.value)
        run(torch.ones(64, 8))
        torch._dynamo.reset()
        fresh = memopt.compile(Raises().train(training), budget, backend="aten")
        fresh(torch.ones(64, 8))
    assert list(before) == list(model.state_dict()) and run.report.budget_bytes == fresh.report.budget_bytes


@pytest.mark.quick("KeyboardInterrupt", "MemoryError")
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, memopt.CaptureError, memopt.PassError("x", [], "y")])
def test_what_is_for_the_user_is_not_taken_for_a_failure(error, monkeypatch):
    def stop(*args, **kwargs):
        raise error

    run = memopt.compile(Net(), backend="aten")
    with monkeypatch.context() as patch:
        patch.setattr("memopt.compilation.session.Session.plan_training", stop)
        with pytest.raises(error if isinstance(error, type) else type(error)):
            run(X)
    run(X)
    assert run.report


def test_planning_ahead_tells_of_a_failure_and_plans_nothing(monkeypatch, caplog):
    with monkeypatch.context() as planted:
        plant(planted, "pass")
        with caplog.at_level(logging.WARNING, "memopt"):
            run = memopt.compile(Net(), backend="aten", example_inputs=X)
        assert len(caplog.records) == 1 and "a planted fault" in caplog.records[0].getMessage()
        for call in (lambda: memopt.plan(Net(), X), lambda: memopt.compile(Net(), "1MB", example_inputs=X)):
            with pytest.raises(memopt.CaptureError, match="a planted fault"):
                call()
        with pytest.raises(RuntimeError, match=r"mat1 and mat2|same reduction dim"):
            memopt.plan(Net(), torch.randn(2, 5))
    run(X)
    assert run.report


def test_inputs_that_failed_are_refused_at_once_until_they_are_others(monkeypatch):
    run = memopt.compile(Net(), "1MB", backend="aten")
    calls = []
    monkeypatch.setattr("memopt.compilation.session.Session.plan_training", lambda *_, **__: calls.append(1) or fail())
    for rows in (6, 6, 4, 6, 4):
        with pytest.raises(memopt.CaptureError, match="a planted fault"):
            run(X[:rows])
    assert len(calls) == 2


@pytest.mark.parametrize("budget", ["1MB", "2kB"])
def test_a_model_runs_for_its_own_error_only_within_the_budget(budget, monkeypatch):
    class Seen(Net):
        def forward(self, x):
            if type(x) is torch.Tensor and not torch.compiler.is_compiling():
                ran.put(1)
            return super().forward(x)

    ran: queue.SimpleQueue = queue.SimpleQueue()  # a list would be set back
    plant(monkeypatch, "planner")
    run = memopt.compile(Seen(), budget, backend="aten")
    with pytest.raises(memopt.CaptureError, match="a planted fault"):
        run(X)
    assert ran.qsize() == (budget == "1MB")


class Rollback(nn.Module):
    """The head of what is overwritten has no gradient in eager either."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        shares = torch.softmax(self.first(x), -1)
        shares.masked_fill_(shares > 0.5, 0.2)
        return self.second(x), shares * 1.5


class Expanded(nn.Module):
    """Writes to a part of its input that shows no element twice."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        x[0].mul_(2)
        return self.linear(x), None


@pytest.mark.parametrize(("kind", "given"), [(Rollback, (6, 4)), (Expanded, (1, 4))])
def test_writes_that_no_graph_can_hold_are_named_with_what_to_write_instead(kind, given, caplog):
    model = kind()
    run = memopt.compile(model, backend="aten")
    found = []
    with caplog.at_level(logging.WARNING, "memopt"):
        for call in (model, run):
            model.zero_grad()
            output, _ = call(torch.ones(given).expand(6, 4))
            output.sum().backward()
            found.append([parameter.grad for parameter in model.parameters()])
    assert (found[0][0] is None) == (found[1][0] is None)
    assert torch.equal(found[0][-1], found[1][-1])
    assert "no graph can hold what it writes" in caplog.text and "clone()" in caplog.text
    assert "report it" not in caplog.text
    torch._dynamo.reset()
    with pytest.raises(CaptureError, match=r"no graph can hold what it writes: .*; clone\(\)") as caught:
        memopt.compile(model, "1MB", backend="aten")(torch.ones(given).expand(6, 4))
    assert "\n" not in str(caught.value)


class Shared(nn.Module):
    """Writes to one of two inputs that share memory."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, read, written):
        with torch.no_grad():
            written.mul_(2)
        return self.linear(read.clone())


@pytest.mark.parametrize(
    "shared",
    [lambda x: (x, x.detach()), lambda x: (x, x.view(-1)), lambda x: (x[0], x.view(-1))],
    ids=["detached", "view", "views"],
)
def test_inputs_that_autograd_knows_apart_are_named_with_what_to_write_instead(shared, caplog):
    torch._dynamo.reset()
    model, found = Shared(), []
    with caplog.at_level(logging.WARNING, "memopt"):
        for call in (model, memopt.compile(model, backend="aten")):
            model.zero_grad()
            x = torch.ones(6, 4).requires_grad_()
            call(*shared(x)).sum().backward()
            found.append([x, x.grad, model.linear.weight.grad])
    torch.testing.assert_close(found[1], found[0])
    assert "no graph can hold what it writes" in caplog.text and "clone() the input that shares" in caplog.text
    assert "report it" not in caplog.text
    torch._dynamo.reset()
    with pytest.raises(CaptureError, match=r"no graph can hold what it writes: .*; clone\(\)") as caught:
        memopt.compile(model, "1MB", backend="aten")(*shared(torch.ones(6, 4).requires_grad_()))
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_tensor_that_has_no_shape_runs_eagerly_or_is_refused(caplog):
    model = torch.nn.Linear(3, 2)
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
    run = memopt.compile(model, backend="aten")
    for _ in range(2):
        assert torch.equal(run(nested).to_padded_tensor(0.0), model(nested).to_padded_tensor(0.0))
    assert [record.getMessage().count("layout=torch.jagged") for record in caplog.records] == [1]
    with pytest.raises(memopt.CaptureError, match=r"layout=torch.jagged, or leave the budget out$"):
        memopt.compile(model, "1MB", backend="aten")(nested)


class Holds(nn.Module):
    """Adds a tensor of its own, made plain, to its input, made plain."""

    def __init__(self, tensor, where):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        if where == "own":
            self.own = nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
        elif where == "kept":
            self.register_buffer("kept", tensor)
        else:
            self.held = [tensor]
        self.where = where

    def forward(self, x):
        return self.layer(plain(x)) + plain(self.held[0] if self.where == "held" else getattr(self, self.where)).sum(0)


def plain(tensor):
    return tensor.dequantize() if tensor.is_quantized else tensor.to_dense()


ODD = {
    "onednn": (lambda tensor: tensor.to_mkldnn(), "a tensor in oneDNN's layout: make it plain by to_dense()"),
    "quantized": (
        lambda tensor: torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8),
        "a quantized tensor: make it plain by dequantize()",
    ),
}
PLACES = {"input": "an input", "own": "own", "kept": "kept", "held": "a tensor that the model holds"}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ODD)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor is deprecated", "ignore:.*quantized")
def test_a_tensor_that_no_graph_holds_is_named_with_what_to_write_instead(name, place, training, caplog):
    turn, said = ODD[name]
    x = turn(X) if place == "input" else X
    model = Holds(X if place == "input" else turn(X), "held" if place == "input" else place).train(training)
    with torch.set_grad_enabled(training):
        torch.testing.assert_close(memopt.compile(model, backend="aten")(x), model(x))
        for budget in ("1MB", 0.7):
            run = memopt.compile(model, budget, backend="aten")
            for call in (lambda run=run: run(x), lambda budget=budget: memopt.plan(model, x, budget)):
                with pytest.raises(memopt.CaptureError, match=f" {PLACES[place]} is {re.escape(said)}, or leave the"):
                    call()
    assert [record.getMessage().count(said.partition(":")[0]) for record in caplog.records] == [1]


def test_a_sparse_parameter_runs_eagerly_with_an_optimizer_of_the_others():
    model = Holds(X.to_sparse(), "own")
    optimizer = torch.optim.SGD(model.layer.parameters(), 0.1)
    run = memopt.compile(model, "1MB", optimizer=optimizer, backend="aten")
    run(X).sum().backward()
    found = model.own.grad.to_dense()
    model.zero_grad()
    model(X).sum().backward()
    assert torch.equal(found, model.own.grad.to_dense())
