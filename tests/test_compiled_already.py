"""Models that torch.compile, memopt or a wrapper holds already, and calls within transforms and tracers."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

import memopt

# torch imports parts of its own with warnings when forward mode is first used.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),
    pytest.mark.usefixtures("fresh_dynamo"),
]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.head = inner, nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.inner(x))


def in_place(model):
    model.compile(backend="aot_eager")
    return model


X = torch.linspace(-1, 1, 32).reshape(4, 8)


def gradients_of(run):
    run.zero_grad()
    y = run(X)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in run.parameters())]


# -- compiled already -------------------------------------------------------------------------------------------------

HELD = {
    "torch.compile": lambda: torch.compile(net(), backend="aot_eager"),
    "in place": lambda: in_place(net()),
    "a part": lambda: Outer(torch.compile(net(), backend="aot_eager")),
    "a part in place": lambda: Outer(in_place(net())),
    "DataParallel": lambda: nn.DataParallel(net()),
    "DataParallel of torch.compile": lambda: nn.DataParallel(torch.compile(net(), backend="aot_eager")),
    "averaged": lambda: torch.optim.swa_utils.AveragedModel(net()),
    "a stand-in's part": lambda: memopt.compile(Outer(net()), backend="aten").inner,
    "a part that is a stand-in": lambda: Outer(memopt.compile(net(), backend="aten")),
}


@pytest.mark.quick("torch.compile", "in place", "DataParallel", "a part that is a stand-in")
@pytest.mark.parametrize("how", HELD)
def test_what_is_compiled_already_trains_within_a_budget(how):
    model = HELD[how]()
    expected = gradients_of(HELD[how]())
    run = memopt.compile(model, "1MB", backend="aten")
    for _ in range(3):
        torch.testing.assert_close(gradients_of(run), expected, rtol=0, atol=0)
    assert run.report.budget_bytes == 10**6
    notes = [note for note in run.report.notes if "torch.compile" in note or "stand-in" in note]
    assert len(notes) == (how in ("torch.compile", "a part that is a stand-in"))
    assert not any("outside" in note for note in run.report.notes)


def test_a_stand_in_within_what_torch_compiles_keeps_its_plan_and_its_budget():
    run = memopt.compile(net(), "1MB", backend="aten")
    outer = torch.compile(Outer(run), backend="aot_eager")
    found = gradients_of(outer)
    expected = gradients_of(Outer(net()))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert run.report.budget_bytes == 10**6


def copied(inner):
    outer = Outer(inner)
    memopt.compile(outer, "1MB", backend="aten")
    return copy.deepcopy(outer)


@pytest.mark.quick("1MB-copied", "1.0-Outer", "1MB-<lambda>")
@pytest.mark.parametrize("around", [Outer, copied, lambda inner: Outer(nn.ModuleList([nn.Sequential(inner)])[0])])
@pytest.mark.parametrize("budget", ["1MB", 1.0])
def test_a_stand_in_within_a_model_of_a_budget_is_counted_without_touching_its_gradients(around, budget):
    outer = around(memopt.compile(net(), "1MB", backend="aten"))
    run = memopt.compile(outer, budget, backend="aten")
    for _ in range(2):
        outputs = run(X)
        assert all(parameter.grad is None for parameter in run.parameters())
        torch.testing.assert_close(outputs, Outer(net())(X), rtol=0, atol=0)
        run.zero_grad()
    found, expected = gradients_of(run), gradients_of(Outer(net()))
    assert {type(value) for value in found} == {torch.Tensor}
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_what_cannot_be_compiled_is_refused_in_one_line(monkeypatch):
    run = memopt.compile(net(), backend="aten")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(net())
    parallel = nn.DataParallel(net())
    parallel.device_ids = [0, 1]
    for model, words in (
        (run, "compiled already"),
        (torch.compile(run), "compiled already"),
        (scripted, "original model"),
        (parallel, "DDP"),
        (X, "not Tensor"),
    ):
        with pytest.raises(TypeError, match=words) as caught:
            memopt.compile(model, "1MB")
        assert "\n" not in str(caught.value)
    with pytest.raises(RuntimeError, match="DistributedDataParallel"):
        run._replicate_for_data_parallel()


# -- transforms and tracers -------------------------------------------------------------------------------------------


def doubled(model):
    return {name: value.detach() * 2 for name, value in model.named_parameters()}


def forward_mode(model):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(X, X)))[1]


def counted(model):
    with FlopCounterMode(display=False) as counter:
        model(X)
    return torch.tensor(counter.get_total_flops())


def traced(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(model, (X,))(X)


AROUND = {
    "grad of parameters": lambda m: grad(lambda p: functional_call(m, p, (X,)).square().sum())(doubled(m)),
    "grad of inputs": lambda m: grad(lambda x: m(x).sum())(X),
    "vmap": lambda m: vmap(m)(X),
    "gradients of each sample": lambda m: vmap(grad(lambda p, x: functional_call(m, p, (x,)).sum()), in_dims=(None, 0))(
        doubled(m), X
    ),
    "jvp": lambda m: jvp(m, (X,), (X,)),
    "vjp": lambda m: vjp(m, X)[1](torch.ones(4, 4))[0],
    "jacrev": lambda m: jacrev(m)(X),
    "hessian": lambda m: hessian(lambda x: m(x).sum())(X),
    "forward mode": forward_mode,
    "make_fx": lambda m: make_fx(lambda x: m(x))(X)(X),
    "jit.trace": traced,
    "dispatch mode": counted,
}
PLANNED = {
    "functional_call": lambda m: functional_call(m, doubled(m), (X,)),
    "gradients of functional_call": lambda m: functional_gradients(m),
    "jacobian": lambda m: torch.autograd.functional.jacobian(m, X),
    "checkpoint": lambda m: torch.utils.checkpoint.checkpoint(m, X, use_reentrant=False),
    "export": lambda m: torch.export.export(m, (X,)).module()(X),
}


def functional_gradients(model):
    parameters = {name: value.requires_grad_() for name, value in doubled(model).items()}
    return torch.autograd.grad(functional_call(model, parameters, (X,)).sum(), list(parameters.values()))


def works(run):
    """Whether the stand-in trains as the model does, and another one made later does."""
    for each in (run, memopt.compile(net(), "1MB", backend="aten")):
        torch.testing.assert_close(gradients_of(each), gradients_of(net()), rtol=0, atol=0)
        assert each.report


@pytest.mark.quick("vmap", "grad of parameters", "dispatch mode", "export", "checkpoint")
@pytest.mark.parametrize("around", [*AROUND, *PLANNED])
def test_without_a_budget_it_is_as_the_model_and_later_ones_are_compiled(around):
    use = {**AROUND, **PLANNED}[around]
    run = memopt.compile(net(), backend="aten")
    for _ in range(2):
        torch.testing.assert_close(pytree.tree_leaves(use(run)), pytree.tree_leaves(use(net())))
    works(run)


@pytest.mark.quick("make_fx", "hessian", "jit.trace")
@pytest.mark.parametrize("around", AROUND)
def test_within_a_budget_it_is_refused_in_one_line_and_later_ones_are_compiled(around):
    run = memopt.compile(net(), "1MB", backend="aten")
    for _ in range(2):
        with pytest.raises(memopt.CaptureError, match="call the original model") as caught:
            AROUND[around](run)
        assert "\n" not in str(caught.value)
        works(run)


@pytest.mark.quick("functional_call", "checkpoint")
@pytest.mark.parametrize("around", PLANNED)
def test_what_is_planned_through_keeps_its_budget(around):
    run = memopt.compile(net(), "1MB", backend="aten")
    torch.testing.assert_close(pytree.tree_leaves(PLANNED[around](run)), pytree.tree_leaves(PLANNED[around](net())))
    works(run)


def test_no_report_is_an_attribute_that_is_not_there():
    run = memopt.compile(net(), backend="aten")
    assert not hasattr(run, "report")
    with pytest.raises(RuntimeError, match="nothing is planned yet"):
        _ = run.report
