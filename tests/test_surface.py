"""A compiled model beside the model itself: what it takes and returns, and how it behaves as a module."""

import copy
import dataclasses
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memopt
from tests.end_to_end import build, step


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


def compiled(model, budget=None, **options):
    return memopt.compile(model, budget, backend="aten", **options)


def gradients_of(run, model, *args, loss=None, **kwargs):
    """The result of a call, and the gradients of its loss, under one seed; the gradients are taken away again."""
    torch.manual_seed(2)
    out = run(*args, **kwargs)
    (out if loss is None else loss(out)).sum().backward()
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return out, grads


def assert_like_eager(model, *args, budget=None, loss=None, **kwargs):
    """Result and gradients bitwise equal to eager's; the compiled module."""
    expected, expected_grads = gradients_of(model, model, *args, loss=loss, **kwargs)
    run = compiled(model, budget)
    found, grads = gradients_of(run, model, *args, loss=loss, **kwargs)
    assert type(found) is type(expected)
    wanted = [(expected if loss is None else loss(expected)).detach(), *expected_grads]
    for value, reference in zip([(found if loss is None else loss(found)).detach(), *grads], wanted, strict=True):
        assert (value is None) == (reference is None)
        if value is not None:
            torch.testing.assert_close(value, reference, rtol=0, atol=0)
    return run


class Small(nn.Module):
    """Two layers with dropout between them."""

    def __init__(self, width=16):
        super().__init__()
        self.first, self.second = nn.Linear(8, width), nn.Linear(width, 4)
        self.dropout = nn.Dropout(0.2)

    def body(self, x):
        return self.second(self.dropout(self.first(x).tanh()))

    def forward(self, x):
        return self.body(x)


X = torch.linspace(-1, 1, 48).reshape(6, 8)


# -- what goes in and comes out ---------------------------------------------------------------------------------------


class Broken(Small):
    """Two graphs, with a print and a break between them."""

    def forward(self, x):
        y = self.first(x).tanh()
        print("between")
        torch._dynamo.graph_break()
        return self.second(self.dropout(y))


@pytest.mark.quick("1MB")
@pytest.mark.parametrize("budget", [None, "1MB"])
def test_graph_breaks(budget, capsys):
    run = assert_like_eager(Broken(), X, budget=budget)
    assert capsys.readouterr().out.count("between") >= 2
    if budget is not None:
        assert len(run.report.programs) == 2


def test_graph_breaks_within_eagers_own_peak(caplog):
    """What is between two graphs takes the plan a little beyond it: the model runs as it is, which keeps it."""
    assert_like_eager(Broken(), X, budget=1.0)
    (line,) = [record.getMessage() for record in caplog.records if "runs as it is" in record.getMessage()]
    assert "\n" not in line and "no plan was made: one takes at least" in line


def test_a_budget_over_a_graph_break_counts_the_whole_step():
    model = Broken(width=256)
    x = torch.randn(64, 8)
    report = memopt.plan(model, (x,))
    assert len(report.programs) == 2
    run = compiled(model, report.unconstrained_bytes)
    run(x).sum().backward()
    model.zero_grad()
    resident = sum(p.numel() * 4 for p in model.parameters()) + x.numel() * 4
    measured = resident + memopt.measure(lambda: run(x).sum().backward(), device="cpu").peak_bytes
    assert run.report.peak_bytes == pytest.approx(measured, rel=0.02)
    assert measured <= report.unconstrained_bytes


class Options(Small):
    def forward(self, x, *, scale=1.0, mode="plain", mask=None, depth=1):
        for _ in range(depth):
            x = x * scale
        y = self.body(x)
        y = y if mask is None else y * mask
        return {"plain": y, "square": y * y}[mode]


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"scale": 0.5}, {"mode": "square", "depth": 3}, {"mask": torch.tensor([1.0, 0.0, 1.0, 0.0])}],
    ids=["none", "float", "string_and_int", "tensor"],
)
def test_keyword_and_non_tensor_arguments(kwargs):
    assert_like_eager(Options(), X, **kwargs)


def test_one_compiled_model_takes_different_arguments():
    model = Options().eval()
    run = compiled(model)
    for kwargs in ({}, {"scale": 0.5}, {"scale": 0.25}, {"mode": "square"}, {"depth": 2}):
        torch.testing.assert_close(run(X, **kwargs), model(X, **kwargs), rtol=0, atol=0)


@dataclasses.dataclass
class Result:
    value: torch.Tensor
    extra: dict
    label: str = ""


class Outputs(Small):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        y = self.body(x)
        z = y.square()
        return {
            "dict": {"a": y, "b": [z, None], "n": 3},
            "tuple": (y, z.detach(), "name", 7),
            "dataclass": Result(y, {"z": z, "x": x}, "label"),
            "alias": (y, y, y[0], x),
        }[self.kind]


@pytest.mark.parametrize("kind", ["dict", "tuple", "dataclass", "alias"])
def test_structured_outputs(kind):
    def loss(out):
        return out.value + out.extra["z"] if kind == "dataclass" else out["a"] if kind == "dict" else out[0]

    model = Outputs(kind)
    run = assert_like_eager(model, X, loss=loss)
    torch.manual_seed(0)
    found = run(X)
    torch.manual_seed(0)
    expected = model(X)
    if kind == "dict":
        assert list(found) == list(expected) and found["n"] == 3 and found["b"][1] is None
    if kind == "tuple":
        assert found[2:] == expected[2:] and not found[1].requires_grad
    if kind == "dataclass":
        assert found.label == "label" and found.extra["x"] is X
    if kind == "alias":
        assert found[3] is X and found[2].data_ptr() == found[0].data_ptr() == found[1].data_ptr()


def test_outputs_that_are_no_tensors():
    class Plain(nn.Module):
        def forward(self, x):
            return "text", x.shape[0], None

    assert compiled(Plain())(X) == ("text", 6, None)


def test_a_model_without_parameters():
    class Pure(nn.Module):
        def forward(self, x):
            return x.sin().square().sum()

    x, y = (X.clone().requires_grad_() for _ in range(2))
    model = Pure()
    run = compiled(model, "1MB")
    run(x).backward()
    model(y).backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=0)
    torch.testing.assert_close(run(X), model(X), rtol=0, atol=0)
    assert run.report.breakdown.parameters == 0


def test_gradients_of_inputs():
    model = Small().eval()
    x, y = (X.clone().requires_grad_() for _ in range(2))
    compiled(model, "1MB")(x).sum().backward()
    model(y).sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=0)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return F.cross_entropy(self.head(self.embed(ids).tanh()), ids)


def test_tied_weights_count_once():
    ids = torch.arange(10)
    run = assert_like_eager(Tied(), ids, budget="1MB")
    assert run.report.breakdown.parameters == 12 * 8 * 4
    assert [name for name, _ in run.named_parameters()] == ["embed.weight"]


def test_frozen_parameters_get_no_gradient():
    model = Small()
    model.first.requires_grad_(False)
    run = assert_like_eager(model, X, budget="1MB")
    run(X).sum().backward()
    assert model.first.weight.grad is None and model.second.weight.grad is not None


class Counting(Small):
    """A buffer that forward writes, in place and by assignment."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        self.calls.add_(1)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.body(x + self.mean)


@pytest.mark.parametrize("training", [True, False])
def test_buffers_that_forward_writes(training):
    model, twin = Counting().train(training), Counting().train(training)
    twin.load_state_dict(model.state_dict())
    run = compiled(model)
    with torch.set_grad_enabled(training):
        for _ in range(3):
            torch.manual_seed(1)
            found = run(X)
            torch.manual_seed(1)
            torch.testing.assert_close(found, twin(X), rtol=0, atol=0)
    torch.testing.assert_close(run.state_dict(), twin.state_dict(), rtol=0, atol=0)
    assert run.calls == 3


class CustomError(Exception):
    pass


@pytest.mark.quick("1MB")
@pytest.mark.parametrize("budget", [None, "1MB"])
def test_an_error_of_the_model_comes_through(budget):
    class Raises(Small):
        def forward(self, x):
            if x.shape[0] == 3:
                raise CustomError("three")
            return self.body(x)

    run = compiled(Raises(), budget)
    with pytest.raises(CustomError, match="three"):
        run(X[:3])
    assert run(X).shape == (6, 4)


def test_a_shape_error_of_the_model_comes_through():
    for budget in (None, "1MB"):
        with pytest.raises(RuntimeError, match=r"cannot be multiplied \(2x5 and 8x16\)") as caught:
            compiled(Small(), budget)(torch.randn(2, 5))
        assert "\n" not in str(caught.value)


# -- the module -------------------------------------------------------------------------------------------------------


def test_parameters_and_names_are_the_model_s():
    model = Counting()
    run = compiled(model)
    assert [(n, id(p)) for n, p in run.named_parameters()] == [(n, id(p)) for n, p in model.named_parameters()]
    assert [(n, id(b)) for n, b in run.named_buffers()] == [(n, id(b)) for n, b in model.named_buffers()]
    assert list(run.state_dict()) == list(model.state_dict())
    assert run.first is model.first and isinstance(run, nn.Module)
    with pytest.raises(AttributeError, match="nowhere"):
        _ = run.nowhere
    with pytest.raises(RuntimeError, match="nothing is planned yet"):
        _ = run.report


def test_what_holds_modules_is_looked_into_as_the_model_is():
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    run = compiled(layers, "1MB")
    run(X).sum().backward()
    for again in (run, copy.deepcopy(run), copy.copy(run), pickle.loads(pickle.dumps(run))):
        assert isinstance(again, type(run)) and type(again).__name__ == "CompiledModule"
        assert len(again) == 3 and [type(layer) for layer in again] == [nn.Linear, nn.Tanh, nn.Linear]
        assert again[-1] is again._memopt.model[-1] and len(again[:2]) == 2 and again[1] in again and bool(again)
    assert list(run) == list(layers)
    named = compiled(nn.ModuleDict({"a": nn.Linear(8, 8)}))
    assert "a" in named and "b" not in named and named["a"] is named._memopt.model["a"] and list(named) == ["a"]
    plain = compiled(Small())
    assert plain and type(plain) is memopt.module.CompiledModule
    with pytest.raises(TypeError, match="len"):
        len(plain)
    with pytest.raises(TypeError, match="subscriptable"):
        plain[0]


def test_load_state_dict_reaches_the_model():
    model, other = Small().eval(), Small().eval()
    run = compiled(model)
    with torch.no_grad():
        run(X)
        result = run.load_state_dict(other.state_dict())
        assert not result.missing_keys and not result.unexpected_keys
        torch.testing.assert_close(run(X), other(X))


def test_a_deep_copy_is_a_model_of_its_own():
    model = Small()
    run = compiled(model, "1MB")
    run(X)
    twin = copy.deepcopy(run)
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in run.parameters()}
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not twin.eval()(X).any()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert run.training


def test_pickle_keeps_the_budget_and_the_weights():
    run = compiled(Small(), "1MB").eval()
    with torch.no_grad():
        expected = run(X)
        again = pickle.loads(pickle.dumps(run))
        torch.testing.assert_close(again(X), expected, rtol=0, atol=0)
    assert not again.training
    assert again.report.budget_bytes == 1_000_000


def test_another_dtype_is_planned_anew():
    model = Small()
    run = compiled(model, "1MB")
    run(X)
    before = run.report.peak_bytes
    assert run.to(torch.float64) is run
    assert model.first.weight.dtype == torch.float64
    found = run(X.double())
    assert found.dtype == torch.float64
    assert run.report.peak_bytes > 1.5 * before


def test_freezing_and_unfreezing_is_followed():
    model = Small().eval()
    run = compiled(model)
    for trainable in (True, False, True):
        model.first.requires_grad_(trainable)
        _, expected = gradients_of(model, model, X)
        _, found = gradients_of(run, model, X)
        assert [g is None for g in found] == [g is None for g in expected]
        for a, b in zip(found, expected, strict=True):
            assert a is b is None or torch.equal(a, b)


@pytest.mark.long
def test_accumulated_gradients_equal_eager_s_and_stay_inside():
    model, inputs = build("resnet18")
    model.eval()  # its running statistics stand still, so that one model serves both runs
    report = memopt.plan(model.train(), inputs)
    model.eval()
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    budget = report.unconstrained_bytes + gradients
    run = compiled(model, budget)
    for _ in range(2):
        step(model, inputs)
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for _ in range(2):
        step(run, inputs)
    torch.testing.assert_close([p.grad for p in model.parameters()], expected, rtol=0, atol=0)
    resident = gradients * 2 + sum(t.numel() * t.element_size() for t in (*model.buffers(), *inputs.values()))
    measured = resident + memopt.measure(step, run, inputs).peak_bytes
    assert measured <= budget
    assert run.report.peak_bytes == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("budget", [None, "tight"])
def test_backward_twice_with_retain_graph(budget):
    model = Small(width=64)
    x = torch.randn(32, 8)
    if budget == "tight":
        budget = int(memopt.plan(model, (x,)).minimum_bytes * 1.02)
    found = []
    for run in (model, compiled(model, budget)):
        model.zero_grad()
        torch.manual_seed(1)
        loss = run(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


# -- arguments of memopt.compile --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "budget", ["20", "20XB", "-1GB", "nan", "", "0GB", 0, -5, True, 1.5, 0.0, float("nan"), float("inf"), [], "5 B B"]
)
def test_bad_budgets_are_refused_in_one_line(budget):
    with pytest.raises(ValueError, match="budget") as caught:
        compiled(Small(), budget)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"backend": "nowhere"}, ValueError, "unknown backend 'nowhere'.*aten.*inductor"),
        ({"allow": ("offload",)}, ValueError, "unknown lever 'offload'"),
        ({"verify": "half"}, ValueError, "verify"),
        ({"passes": ("fuse",)}, TypeError, "memopt.Pass"),
    ],
    ids=["backend", "allow", "verify", "passes"],
)
def test_arguments_that_are_not_understood(options, error, message):
    with pytest.raises(error, match=message) as caught:
        memopt.compile(Small(), **{"backend": "aten", **options})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model", [torch.relu, None, "gpt2"])
def test_something_that_is_no_module(model):
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module"):
        compiled(model)


def test_a_model_is_not_compiled_twice():
    with pytest.raises(TypeError, match="compiled already"):
        compiled(compiled(Small()))


@pytest.mark.parametrize("form", ["tuple", "mapping", "tensor"])
def test_example_inputs(form):
    given = {"tuple": (X,), "mapping": {"x": X}, "tensor": X}[form]
    run = compiled(Small(), "1MB", example_inputs=given)
    assert run.report.budget_bytes == 1_000_000


def test_no_passes_at_all():
    model = Small()
    run = compiled(model, passes=())
    _, expected = gradients_of(model, model, X)
    _, found = gradients_of(run, model, X)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert run.report.passes == ()
    with pytest.raises(memopt.BudgetError) as caught:
        compiled(model, run.report.peak_bytes - 1, passes=())(X)
    assert caught.value.minimum_bytes == run.report.peak_bytes


class TanhTwice(memopt.Pass):
    """A user's pass: swaps tanh for another function of the same shape."""

    name = "swap_tanh"

    def __init__(self, target):
        self.target = target

    def run(self, program):
        new = program.copy()
        found = [node for node in new.graph.nodes if node.target is torch.ops.aten.tanh.default]
        if not found:
            return memopt.PassResult(program)
        for node in found:
            with new.graph.inserting_before(node):
                after = new.graph.call_function(self.target, node.args)
                after.meta.update(node.meta)
            node.replace_all_uses_with(after)
            new.graph.erase_node(node)
        changes = (memopt.Change("swapped", tuple(node.name for node in found)),)
        return memopt.PassResult(new.finish(), changes)


def test_a_user_s_own_pass_runs_and_is_on_record():
    model = Small().eval()
    run = compiled(model, passes=[TanhTwice(torch.ops.aten.sin.default)], verify=False)
    with torch.no_grad():
        torch.testing.assert_close(run(X), model.second(model.first(X).sin()))
    (record,) = run.report.passes
    assert record.name == "swap_tanh" and len(record.changes) == 1 and record.evidence is None


@pytest.mark.parametrize("verify", [True, "full"])
def test_a_user_s_pass_that_changes_the_numbers_is_caught(verify):
    run = compiled(Small().eval(), passes=[TanhTwice(torch.ops.aten.sin.default)], verify=verify)
    with torch.no_grad(), pytest.raises(memopt.PassError, match="swap_tanh"):
        run(X)


def test_full_verification():
    model = Small()
    run = compiled(model, 1.0, verify="full")
    _, expected = gradients_of(model, model, X)
    _, found = gradients_of(run, model, X)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    changed = [record for record in run.report.passes if record.changes]
    assert changed and all(record.evidence.scope == "program" for record in changed if record.evidence.regions)


def test_an_optimizer_s_step_is_inside_the_budget():
    model, inputs = build("gpt2")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    run = compiled(model, optimizer=optimizer)
    parameters = list(model.parameters())

    def whole():
        optimizer.zero_grad()
        step(run, inputs)
        optimizer.step()

    whole()
    report = run.report
    size = sum(p.numel() * p.element_size() for p in parameters)
    state = sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values())
    assert report.breakdown.optimizer_state == state == 2 * size + 4 * len(parameters)
    optimizer.zero_grad()
    resident = size + state + sum(t.numel() * t.element_size() for t in (*model.buffers(), *inputs.values()))
    measured = resident + memopt.measure(whole).peak_bytes
    assert report.peak_bytes == pytest.approx(measured, rel=0.02)
