"""Calls like an earlier one: past Dynamo where nothing changed, and whatever changes between two is seen."""

import contextlib
import threading
import types

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import memopt
import memopt.compilation.session
from memopt.calls.guard_fast_path import Kind, _binder
from memopt.compilation.layout import LayoutNeeded

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


FACTOR = 2.0


class Net(nn.Module):
    """Weights that are folded and such that are not, a buffer, a mode, plain attributes, a global and defaults."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(3, 4)
        self.register_buffer("shift", torch.randn(4))
        self.scale = 3.0

    def forward(self, x, factor=1.0, *, extra=None):
        x = self.drop(self.norm(self.conv(x)).relu())
        x = self.head(x.mean((2, 3))) * self.scale * FACTOR * factor + self.shift
        return x if extra is None else x + extra


def net():
    model = Net().double().eval()
    for tensor in (model.norm.running_mean, model.norm.running_var):
        nn.init.uniform_(tensor, 0.5, 1.5)
    return model


def image(*shape):
    return torch.randn(*(shape or (2, 2, 6, 6)), dtype=torch.float64)


@contextlib.contextmanager
def ways(compiled):
    """Collects the way that each call takes, "short" or "long", or "as it is" where the model runs by itself."""
    taken, long, forward = [], compiled._memopt.planned.run, compiled.forward
    by_itself = compiled._memopt.transformed.call

    def planned_call(*args):
        taken[-1] = "long"
        return long(*args)

    def called_by_itself(*args):
        taken[-1] = "as it is"
        return by_itself(*args)

    def called(*args, **kwargs):
        taken.append("short")
        return forward(*args, **kwargs)

    compiled._memopt.planned.run, compiled.forward = planned_call, called
    compiled._memopt.transformed.call = called_by_itself
    try:
        yield taken
    finally:
        del compiled._memopt.planned.run, compiled.forward, compiled._memopt.transformed.call


def same(compiled, model, *args, tolerance=1e-10, **kwargs):
    with torch.no_grad():
        expected = model(*args, **kwargs)
        torch.testing.assert_close(compiled(*args, **kwargs), expected, rtol=tolerance, atol=tolerance)


def steady(model, *args, backend="aten", **options):
    """The compiled model after a call, the next of which takes the short way."""
    compiled = memopt.compile(model, backend=backend, **options)
    with ways(compiled) as taken:
        same(compiled, model, *args)
        same(compiled, model, *args)
    assert taken == ["long", "short"]
    return compiled


def test_more_shapes_than_are_kept_are_not_looked_for_without_end(monkeypatch):
    monkeypatch.setattr("memopt.calls.guard_fast_path._MOST", 2)
    model, inputs = Plain().eval(), [torch.randn(size, 4) for size in (2, 3, 4, 5)]
    compiled = memopt.compile(model, backend="aten")
    known = compiled._memopt.fast_path._known[Kind(gradients=False, accumulating=False)]
    known.left = 3
    for _ in range(3):
        for x in inputs:
            same(compiled, model, x)
            assert len(known.graphs) <= 2
    assert known.left == 0
    with ways(compiled) as taken:
        for x in inputs:
            same(compiled, model, x)
    assert sorted(taken) == ["long", "long", "short", "short"]


def test_arguments_are_bound_as_by_the_model():
    model, x = net(), image()
    compiled = steady(model, x)
    for args, kwargs in [((x, 2.0), {}), ((x,), {"factor": 3.0}), ((), {"x": x}), ((x,), {"extra": torch.randn(4)})]:
        same(compiled, model, *args, **kwargs)
        with ways(compiled) as taken:
            same(compiled, model, *args, **kwargs)
        assert taken == ["short"]
    with torch.no_grad():
        for args, kwargs in [((), {}), ((x, 1.0, None), {}), ((x,), {"unknown": 1})]:
            with pytest.raises(TypeError):
                compiled(*args, **kwargs)
    same(compiled, model, x)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) + 1


@pytest.mark.parametrize("before", [True, False])
def test_hooks_of_the_model_are_called(before):
    model, x = Plain().eval(), torch.randn(2, 4)
    compiled = steady(model, x)
    if before:
        handle = model.register_forward_pre_hook(lambda module, args: (args[0] * 3,))
    else:
        handle = model.register_forward_hook(lambda module, args, output: output * 2)
    for _ in range(3):
        same(compiled, model, x)
    handle.remove()
    with ways(compiled) as taken:
        same(compiled, model, x)
    assert taken == ["short"]


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_hooks_of_all_modules_are_called():
    model, x = Plain().eval(), torch.randn(2, 4)
    compiled = steady(model, x)
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(module))
    try:
        same(compiled, model, x)
    finally:
        handle.remove()
    assert seen.count(model) == 2


def test_hooks_of_the_compiled_module_are_its_own():
    model, x = Plain().eval(), torch.randn(2, 4)
    compiled = steady(model, x)
    compiled.register_forward_hook(lambda module, args, output: output * 2)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x) * 2)


class Broken(nn.Module):
    """A model that does something that is no part of a graph, in its middle or at its end."""

    def __init__(self, middle):
        super().__init__()
        self.linear, self.middle, self.seen = nn.Linear(4, 4), middle, []

    def forward(self, x):
        x = self.linear(x)
        if self.middle:
            torch._dynamo.graph_break()
            return self.linear(x) + 1
        return self.told(x)

    @torch._dynamo.disable
    def told(self, x):
        self.seen.append(float(x.sum()))
        return x * 2


@pytest.mark.parametrize("middle", [True, False])
def test_a_call_of_several_graphs_goes_the_long_way(middle):
    model, x = Broken(middle).eval(), torch.randn(2, 4)
    compiled = memopt.compile(model, backend="aten")
    with ways(compiled) as taken:
        for _ in range(3):
            same(compiled, model, x)
    assert taken == ["long"] * 3
    assert len(model.seen) == (0 if middle else 6)


class Counts(nn.Module):
    """A model that writes to itself."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(4))
        self.last = None

    def forward(self, x):
        self.total += x.sum(0)
        self.last = x * 2
        return {"total": self.total.clone(), "pair": (x + 1, "text")}


def test_what_a_model_writes_to_itself_is_written():
    model, x = Counts(), torch.randn(2, 4)
    compiled = memopt.compile(model, backend="aten")
    with torch.no_grad(), ways(compiled) as taken:
        for number in range(1, 5):
            found = compiled(x)
            torch.testing.assert_close(model.total, number * x.sum(0))
            torch.testing.assert_close(found["total"], model.total)
            torch.testing.assert_close(model.last, x * 2)
            assert found["pair"][1] == "text"
            model.last = None
    assert taken[-1] == "short"


class Derived(Plain):
    """A model whose function has cells, and takes whatever it is given."""

    def forward(self, *args, **kwargs):
        return super().forward(*args) * kwargs.get("factor", 1)


def test_functions_with_cells_and_stars():
    model, x = Derived().eval(), torch.randn(2, 4)
    compiled = steady(model, x)
    same(compiled, model, x, factor=2)
    same(compiled, model, x, factor=3)
    with ways(compiled) as taken:
        same(compiled, model, x, factor=2)
    assert taken == ["short"]


def test_what_torch_compile_is_told_is_followed():
    model, x = Plain().eval(), torch.randn(2, 4)
    compiled = steady(model, x)
    with ways(compiled) as taken:
        with torch.compiler.set_stance("force_eager"):
            same(compiled, model, x)
        torch._dynamo.reset()
        same(compiled, model, x)
        same(compiled, model, x)
    assert taken == ["long", "long", "short"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_tracing_is_as_it_was():
    model, x = Plain().eval(), torch.randn(2, 4)
    compiled = steady(model, x)
    with torch.no_grad():
        with ways(compiled) as taken:
            traced = torch.jit.trace(compiled, (x,), check_trace=False)
        assert taken == ["as it is"]
        torch.testing.assert_close(traced(x + 1), model(x + 1))
        outer = torch.compile(lambda x: compiled(x) * 2, backend="eager")
        torch.testing.assert_close(outer(x), model(x) * 2)
        torch.testing.assert_close(outer(x), model(x) * 2)
        rows = torch.vmap(compiled)(x)
        torch.testing.assert_close(rows, model(x))
    same(compiled, model, x)


class Looks(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_within_a_mode_that_looks_at_operators_the_model_runs_eagerly():
    model, x = Plain().eval(), torch.randn(2, 4)
    compiled = steady(model, x)
    with ways(compiled) as taken:
        with Looks():
            same(compiled, model, x)
        same(compiled, model, x)
    assert taken == ["as it is", "short"]


def in_threads(work, given):
    """Run `work` on each of `given`, all at once; returns what failed, and a line for each thread that hangs."""
    failures = []

    def run(x):
        try:
            work(x)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(x,), daemon=True) for x in given]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return failures + ["a thread hangs" for thread in threads if thread.is_alive()]


def test_threads_may_call_together():
    model = net()
    inputs = [image(), image(1, 2, 6, 6)]
    compiled = memopt.compile(model, backend="static")
    for x in inputs:
        same(compiled, model, x)

    def work(x):
        for _ in range(20):
            same(compiled, model, x)

    assert in_threads(work, inputs * 2) == []


def test_frozen_weights_stay_frozen():
    model, x = net(), image()
    expected = model(x).detach()
    compiled = memopt.compile(model, backend="aten", allow=("freeze",))
    with torch.no_grad(), ways(compiled) as taken:
        for _ in range(3):
            torch.testing.assert_close(compiled(x), expected, rtol=1e-10, atol=1e-10)
        model.conv.weight.mul_(2.0)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-10, atol=1e-10)
    assert taken == ["long", *["short"] * 3]


def test_two_models_of_a_class_are_kept_apart():
    x = torch.randn(2, 4)
    models = [Plain().eval(), Plain().eval()]
    compiled = [steady(model, x) for model in models]
    for one, model in zip(compiled, models, strict=True):
        same(one, model, x)


def test_weights_that_should_be_laid_out_otherwise_once_they_are_folded_anew(monkeypatch):
    model, x = net(), image()
    compiled = steady(model, x)
    settled = memopt.compilation.layout.with_layout

    def settle(*args):
        monkeypatch.setattr("memopt.compilation.layout.with_layout", settled)
        raise LayoutNeeded([], [], [True])

    monkeypatch.setattr("memopt.compilation.layout.with_layout", settle)
    with torch.no_grad():
        model.conv.weight.mul_(2.0)
    with ways(compiled) as taken:
        same(compiled, model, x)
        same(compiled, model, x)
    assert taken == ["long", "short"]


def test_memory_that_runs_out_is_told_in_one_line():
    model, x = Plain().eval(), torch.randn(2, 4)
    compiled = steady(model, x)

    def fail(*args):
        raise torch.OutOfMemoryError("no memory")

    compiled._memopt.fast_path._known[Kind(gradients=False, accumulating=False)].graphs[0].call = fail
    with torch.no_grad(), pytest.raises(MemoryError, match="memory ran out in a step planned to take"):
        compiled(x)


@pytest.mark.parametrize(
    "function",
    [
        lambda: 0,
        lambda a, b, /, c: 0,
        lambda a, *, k: 0,
        lambda *args, k, **kwargs: 0,
        lambda a, /, b, *args, k, **kwargs: 0,
    ],
)
def test_a_binder_takes_what_the_function_takes(function):
    bind = _binder(function.__code__)
    assert isinstance(bind, types.FunctionType)
    code = function.__code__
    given = (1, 2, 3)[: code.co_argcount]
    keywords = {"k": 4} if code.co_kwonlyargcount else {}
    expected = dict(zip(code.co_varnames, given, strict=False)) | keywords
    expected |= {name: () for name in code.co_varnames if name == "args"}
    expected |= {name: {} for name in code.co_varnames if name == "kwargs"}
    assert bind(*given, **keywords) == expected
