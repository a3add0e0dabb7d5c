"""An autograd.Function under torch.vmap and torch.func keeps its backward."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import memopt
from memopt.difference.recorded import record_programs
from memopt.torch_compat import dynamo

# Of torch's own code.
pytestmark = pytest.mark.filterwarnings(
    "ignore:<class 'torch.autograd.function.Function'> should not be instantiated", "ignore:`torch.jit.script`"
)

X = torch.linspace(-1, 1, 8 * 4).reshape(8, 4)


class Round(torch.autograd.Function):
    """A straight-through estimator."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g


class OwnRule(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.sign()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return 3 * g

    @staticmethod
    def vmap(info, in_dims, x):
        return OwnRule.apply(x), in_dims[0]


class Two(torch.autograd.Function):
    """Two results, of which one has no gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, y):
        return x.round() * y, x.sign()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, g, _):
        x, y = ctx.saved_tensors
        return g * y, g * x


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return 3 * g


class WithJvp(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g

    @staticmethod
    def jvp(ctx, t):
        return 5 * t


def straight(x):
    return x + (x.round() - x).detach()


CALLS = {
    "vmap": lambda f, x: torch.vmap(lambda row: Round.apply(4 * f(row)))(x).sum(),
    "own_rule": lambda f, x: torch.vmap(lambda row: OwnRule.apply(f(row)))(x).sum(),
    "several_results": lambda f, x: torch.vmap(lambda row: sum(Two.apply(4 * f(row), f(row))))(x).sum(),
    "twice": lambda f, x: torch.vmap(lambda row: Round.apply(f(Round.apply(4 * f(row)))))(x).sum(),
    "of_the_input": lambda f, x: torch.vmap(lambda row: Round.apply(4 * row))(x).sum() + f(x).sum(),
    "nested": lambda f, x: torch.vmap(torch.vmap(lambda row: Round.apply(row)))(4 * f(x)).sum(),
    "vmap_of_grad": lambda f, x: torch.vmap(torch.func.grad(lambda z: Round.apply(4 * f(z)).square().sum()))(x).sum(),
    "grad": lambda f, x: torch.func.grad(lambda z: Round.apply(4 * f(z)).square().sum())(x).sum(),
    "vjp": lambda f, x: torch.func.vjp(lambda z: Round.apply(4 * f(z)).square(), x)[1](torch.ones_like(x))[0].sum(),
    "grad_by_the_input": lambda f, x: (f(x) * torch.func.grad(lambda z: Round.apply(4 * z).square().sum())(X)).sum(),
    "vjp_by_the_input": lambda f, x: (f(x) * torch.func.vjp(lambda z: Round.apply(4 * z), X)[1](X)[0]).sum(),
    "jacrev_by_the_input": lambda f, x: (f(x) * torch.func.jacrev(lambda z: Round.apply(4 * z))(X[0]).sum(1)).sum(),
    "functional_call": lambda f, x: Round.apply(
        4 * torch.func.functional_call(f, dict(f.named_parameters()), (x,))
    ).sum(),
    "jvp": lambda f, x: torch.func.jvp(lambda z: WithJvp.apply(4 * z), (x,), (x,))[1].sum() + f(x).sum(),
    "without_a_function": lambda f, x: torch.vmap(lambda row: straight(4 * f(row)))(x).square().sum(),
    "without_vmap": lambda f, x: Round.apply(4 * f(x)).sum() + Once.apply(f(x)).square().sum(),
}


class Model(nn.Module):
    def __init__(self, call) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.call, self.linear = call, nn.Linear(4, 4)

    def forward(self, x):
        return self.call(self.linear, x)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.quick(
    "grad", "grad_by_the_input", "vjp", "functional_call", "without_vmap", "without_a_function", "own_rule", "vmap"
)
@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_those_of_eager(name):
    found = []
    for make in (lambda model: model, lambda model: memopt.compile(model, backend="aten")):
        model, x = Model(CALLS[name]), X.clone().requires_grad_()
        loss = make(model)(x)
        loss.backward()
        found.append([loss, model.linear.weight.grad, x.grad])
    torch.testing.assert_close(*found)


def test_without_gradients_vmap_is_one_graph():
    model = Model(CALLS["vmap"])
    with torch.no_grad():
        compiled = memopt.compile(model, backend="aten")
        torch.testing.assert_close(compiled(X), model(X))
    assert not compiled.report.notes


def test_without_gradients_a_transform_s_own_are_kept():
    model = Model(CALLS["grad_by_the_input"])
    with torch.no_grad():
        torch.testing.assert_close(memopt.compile(model, backend="aten")(X), model(X))


@pytest.mark.parametrize("budget", [None, pytest.param(1.0, marks=pytest.mark.long)])
def test_a_hessian_leaves_no_level_of_differentiation_open(budget):
    model = Model(lambda f, x: torch.func.hessian(lambda z: f(z).tanh().sum())(x[0]).sum() + f(x).sum())
    torch.testing.assert_close(memopt.compile(model, budget, backend="aten")(X), model(X))


def test_torch_compile_with_memopt_as_its_backend():
    model = Model(CALLS["vmap"])
    torch.compile(model, backend="memopt", options={"backend": "aten"})(X).backward()
    found, model = model.linear.weight.grad, Model(CALLS["vmap"])
    model(X).backward()
    torch.testing.assert_close(found, model.linear.weight.grad)


def test_what_stands_before_dynamo_s_method_is_taken_away_again():
    before = dynamo.AutogradFunctionVariable.call_apply
    with dynamo.functions_keep_backward():
        assert dynamo.AutogradFunctionVariable.call_apply is not before
    assert dynamo.AutogradFunctionVariable.call_apply is before


def test_what_is_given_up_of_one_of_torchs_own_modules_is_captured_of_another():
    given_up = memopt.compile(nn.GRU(4, 8), "1MB", backend="aten")
    given_up(nn.utils.rnn.pack_sequence([X[:3], X[:1]]))
    assert any("no graph could be captured of GRU" in note for note in given_up.report.notes)
    for module in (nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())):
        run = memopt.compile(module, "1MB", backend="aten")
        run(X).sum().backward()
        assert run.report.notes == ()
        assert memopt.plan(module, (X,), "1MB", backend="aten").peak_bytes >= run.report.peak_bytes


def test_what_compiles_and_what_it_made_are_kept_by_who_asks_for_it_alone():
    def function(x):
        y = x + 1
        torch._dynamo.graph_break()  # the code of what has one within is never freed
        return y.relu() + broken(y)

    def broken(x):
        torch._dynamo.graph_break()
        return x * 2

    def backend(graph_module, example_inputs):
        def run(*args):
            return graph_module.forward(*args)

        made.append(weakref.ref(run))
        return run

    made, kept = [], dynamo.Kept(backend)
    loose = kept.while_kept()
    x = torch.ones(2)
    compiled = torch.compile(function, backend=loose)
    assert torch.equal(compiled(x), function(x)) and len(made) > 1
    assert all(run() is not None for run in made)
    del kept, compiled, function
    torch._dynamo.reset()
    gc.collect()
    assert all(run() is None for run in made)
    with pytest.raises(RuntimeError, match="is gone"):
        loose(None, ())


@pytest.fixture
def replaced_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.compile` as Lightning has it: what it is called with is written onto what it made, so onto the module."""
    compiles = torch.compile

    def noted(model, **kwargs):
        made = compiles(model, **kwargs)
        made._compile_kwargs = dict(kwargs)
        return made

    monkeypatch.setattr(torch, "compile", noted)


@pytest.mark.usefixtures("replaced_compile")
@pytest.mark.parametrize("budget", [None, 1.0])
def test_nothing_of_others_is_written_onto_a_module_where_torch_compile_is_replaced(budget: float | None) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))
    before = set(vars(model))
    run = memopt.compile(model, budget, backend="aten", verify="full")
    for rows in (8, 6, 4):  # the last with symbols
        run(torch.ones(rows, 4)).sum().backward()
    with torch.no_grad():
        run(torch.ones(8, 4))
    record_programs(model, (torch.ones(8, 4),), {}, training=True)
    assert set(vars(model)) == before
    run = memopt.compile(nn.Sequential(nn.Linear(4, 4)), backend="aten")
    run(torch.ones(8, 4)).sum().backward()
    assert torch.equal(pickle.loads(pickle.dumps(run))(torch.ones(2, 4)), run(torch.ones(2, 4)))
