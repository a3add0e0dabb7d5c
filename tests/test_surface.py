"""A compiled model beside the model itself: what it takes and returns, and how it behaves as a module."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memopt

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


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
    """What is between two graphs takes the plan a little beyond it: the model runs eagerly, which keeps it."""
    assert_like_eager(Broken(), X, budget=1.0)
    (line,) = [record.getMessage() for record in caplog.records if "runs eagerly" in record.getMessage()]
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
