"""Models compiled in place: calls of the very object run as planned, and whoever holds it need not know."""

import abc
import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

import memopt
from memopt.in_place import compile_in_place, compile_together_in_place, stand_in_of, undo
from memopt.module import calls_of


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.dropout, self.scale = nn.Linear(8, 8), nn.Dropout(0.5), 1.0

    def forward(self, x, labels=None):
        y = self.dropout(self.layer(x)) * self.scale
        return y if labels is None else (y - labels).square().mean()

    def generate(self, x):
        for _ in range(2):
            x = self(x)
        return x


X = torch.linspace(-1, 1, 32).reshape(4, 8)


def made():
    torch.manual_seed(0)
    return Net()


def gradients_of(run):
    run.zero_grad()
    torch.manual_seed(1)
    loss = run(X, labels=X)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in run.parameters())]


@pytest.mark.quick("1MB")
@pytest.mark.parametrize("budget", [None, "1MB"])
def test_the_very_model_trains_within_the_budget_and_keeps_its_class_for_others(budget):
    model, twin = made(), made()
    compile_in_place(model, budget, backend="aten", optimizer=torch.optim.Adam(model.parameters()))
    assert isinstance(model, Net) and type(model).__name__ == "Net" and type(model).__module__ == __name__
    assert inspect.signature(model.forward) == inspect.signature(twin.forward)
    for change in (
        lambda m: None,
        lambda m: setattr(m, "scale", 2.0),
        lambda m: m.eval(),
        lambda m: m.double().float(),
    ):
        change(model), change(twin)
        torch.testing.assert_close(gradients_of(model), gradients_of(twin), rtol=0, atol=0)
    report = stand_in_of(model).report
    assert report.model == "Net" and (report.budget_bytes == 10**6 if budget else report.budget_bytes is None)
    with torch.no_grad():
        torch.testing.assert_close(model(X), twin(X))


def test_hooks_of_the_model_run_once_in_a_call_and_a_forward_set_on_it_counts():
    model, seen = made().eval(), []
    compile_in_place(model, "1MB", backend="aten")
    model.register_forward_hook(lambda *_: seen.append(1))
    expected = model(X)
    assert seen == [1]
    own = type(model).forward
    model.forward = lambda x: 2 * own(model, x)
    torch.testing.assert_close(model(X), 2 * expected)


def test_copies_and_what_is_pickled_are_as_they_were_and_so_is_what_is_undone():
    model = made()
    compile_in_place(model, "1MB", backend="aten")
    for again in (copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(again) is Net and stand_in_of(again) is None
        torch.testing.assert_close(gradients_of(again), gradients_of(model), rtol=0, atol=0)
    first = stand_in_of(model)
    compile_in_place(model, "2MB", backend="aten")
    assert stand_in_of(model) is not first and type(model).__mro__.count(Net) == 1
    gradients_of(model)
    assert stand_in_of(model).report.budget_bytes == 2 * 10**6
    undo(model)
    undo(model)
    assert type(model) is Net and stand_in_of(model) is None


def test_methods_that_call_the_model_may_run_it_eagerly():
    model = made().eval()
    compile_in_place(model, "1MB", backend="aten", eager_methods=("generate", "missing"))
    torch.testing.assert_close(model.generate(X), made().eval().generate(X))
    with pytest.raises(RuntimeError, match="nothing is planned yet"):
        _ = stand_in_of(model).report
    assert not hasattr(model, "missing")


def test_no_register_hears_of_the_class():
    heard = []

    class Meta(abc.ABCMeta):
        def __new__(cls, name, bases, namespace):
            heard.append(name)
            return super().__new__(cls, name, bases, namespace)

    class Registered(Net, metaclass=Meta):
        def __init_subclass__(cls):
            heard.append("subclass")

    model = Registered()
    compile_in_place(model, backend="aten")
    assert heard == ["Registered"] and isinstance(model, Registered) and isinstance(model, Net)
    assert not isinstance(made(), type(model)) and isinstance(model, type(model))


def test_what_cannot_be_compiled_in_place_is_refused_in_one_line_and_stays():
    class Slots(Net):
        __slots__ = ("more",)

    stand_in = memopt.compile(made(), backend="aten")
    for model, words in ((Slots(), "slots"), (stand_in, "compiled already"), (X, "not Tensor")):
        kind = type(model)
        with pytest.raises(TypeError, match=words) as caught:
            compile_in_place(model, "1MB")
        assert "\n" not in str(caught.value) and type(model) is kind
    model = made()
    with pytest.raises(ValueError, match="what"):
        compile_in_place(model, "20")
    assert type(model) is Net


def test_a_refused_budget_is_an_error_that_loops_halve_their_batch_for():
    model = made()
    for run in (memopt.compile(made(), "600B", backend="aten"), model):
        if run is model:
            compile_in_place(model, "600B", backend="aten")
        for _ in range(2):  # found out, and remembered
            with pytest.raises(memopt.BudgetError) as caught:
                run(X, labels=X)
            error = caught.value
            # What accelerate's find_executable_batch_size goes by.
            assert isinstance(error, RuntimeError) and len(error.args) == 1 and " out of memory." in error.args[0]
            assert error.minimum_bytes > 600 and error.budget_bytes == 600 and "\n" not in str(error)
            again = pickle.loads(pickle.dumps(error))
            assert (
                type(again) is type(error) and str(again) == str(error) and again.minimum_bytes == error.minimum_bytes
            )


def test_several_models_in_place_share_a_budget():
    models = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    plain = copy.deepcopy(models)
    compile_together_in_place(models, "1MB", backend="aten", optimizer=optimizers)
    x, found = torch.randn(4, 8), []
    for one, other in (models, plain):
        other(one(x)).sum().backward()
        found.append([parameter.grad for model in (one, other) for parameter in model.parameters()])
    torch.testing.assert_close(*found)
    calls = [calls_of(stand_in_of(model)) for model in models]
    assert calls[0].sessions.group is calls[1].sessions.group and calls[0].sessions.group.several
    for model in models:
        undo(model)
        assert stand_in_of(model) is None
