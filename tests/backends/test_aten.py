"""The aten backend: straight-line code that frees what is done with, and writes where the graph is annotated."""

from __future__ import annotations

import copy
import math
import operator
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import fx

import memopt
from memopt.backends.aten import emit
from memopt.memory.measure import measure
from memopt.passes.inplace import Inplace
from tests.passes.build import trace
from tests.support import assert_same

aten = torch.ops.aten
X = torch.linspace(-1, 1, 24).reshape(4, 6)


def lines(run) -> list[str]:
    return [line.strip() for line in run.source.splitlines()[1:]]


def graph_module(*calls, outputs=None) -> fx.GraphModule:
    """A graph of one input and of calls (operator, arguments, keyword arguments) that take the value before them."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    for target, args, kwargs in calls:
        node = graph.call_function(target, (node, *args), kwargs)
    graph.output([node] if outputs is None else outputs(node))
    return fx.GraphModule(torch.nn.Module(), graph)


def test_values_are_deleted_after_their_last_use() -> None:
    run = emit(trace(lambda x, y: ((x.sin() + y).exp() * y,), X, X + 1).graph_module)
    assert lines(run) == [
        "a0, a1, = args",
        "args.clear()",
        "v0 = _f_aten_sin_default(a0)",
        "del a0",
        "v1 = _f_aten_add_Tensor(v0, a1)",
        "del v0",
        "v2 = _f_aten_exp_default(v1)",
        "del v1",
        "v3 = _f_aten_mul_Tensor(v2, a1)",
        "del a1, v2",
        "return [v3, ]",
    ]


def test_arguments_are_taken_over_and_die_when_done_with() -> None:
    alive: list[bool] = []
    argument = [X.clone()]
    reference = weakref.ref(argument[0])
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(aten.sin.default, (x,))

    def look(value: torch.Tensor) -> torch.Tensor:
        alive.append(reference() is not None)
        return value + 1

    graph.output([graph.call_function(look, (y,))])
    run = emit(fx.GraphModule(torch.nn.Module(), graph))
    assert run._boxed_call is True
    (found,) = run(argument)
    assert argument == [] and alive == [False]
    assert torch.equal(found, X.sin() + 1)


def test_an_argument_that_nobody_reads_dies_first() -> None:
    run = emit(trace(lambda x, y: (x.sin(),), X, X + 1).graph_module)
    assert lines(run)[2] == "del a1"


def test_items_are_unpacked_at_once_and_the_unused_die_with_the_operation() -> None:
    run = emit(trace(lambda x: (torch.sort(x)[0].sin(),), X).graph_module)
    # Without the indices there is room for the sine.
    assert measure(lambda: run([X])).peak_bytes == measure(lambda: torch.sort(X)).peak_bytes
    text = lines(run)
    assert text[text.index("v0 = _f_aten_sort_default(a0)") + 1 :][:3] == ["v0_0 = v0[0]", "v0_1 = v0[1]", "del v0"]


def test_the_same_item_may_be_taken_twice() -> None:
    graph = fx.Graph()
    call = graph.call_function(aten.sort.default, (graph.placeholder("x"),))
    first, second = (graph.call_function(operator.getitem, (call, 0)) for _ in range(2))
    graph.output([graph.call_function(aten.add.Tensor, (first, second))])
    run = emit(fx.GraphModule(torch.nn.Module(), graph))
    assert_same(run([X]), [2 * X.sort()[0]])


def test_items_of_items() -> None:
    def pairs(x: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        return (x + 1, x + 2), x

    graph = fx.Graph()
    call = graph.call_function(pairs, (graph.placeholder("x"),))
    outer = graph.call_function(operator.getitem, (call, 0))
    graph.output([graph.call_function(operator.getitem, (outer, 1))])
    assert_same(emit(fx.GraphModule(torch.nn.Module(), graph))([X]), [X + 2])


def test_outputs_may_be_inputs_repeated_or_nothing() -> None:
    graph = fx.Graph()
    x, unused = graph.placeholder("x"), graph.placeholder("unused")
    y = graph.call_function(aten.sin.default, (x,))
    graph.output([y, None, x, y, 3, unused])
    found = emit(fx.GraphModule(torch.nn.Module(), graph))([X, X])
    assert found[2] is X and found[0] is found[3] and found[1] is None and found[4] == 3 and found[5] is X
    assert_same(found[0], X.sin())


def test_a_graph_without_inputs_and_without_steps() -> None:
    graph = fx.Graph()
    graph.output([graph.call_function(aten.full.default, ([2], 1.5))])
    assert_same(emit(fx.GraphModule(torch.nn.Module(), graph))([]), [torch.full((2,), 1.5)])
    empty = fx.Graph()
    empty.output([])
    assert emit(fx.GraphModule(torch.nn.Module(), empty))([]) == []


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ((aten.mul.Tensor, (math.inf,), {}), X * math.inf),
        ((aten.clamp.default, (None, 0.25), {}), X.clamp(max=0.25)),
        ((aten._to_copy.default, (), {"dtype": torch.float64, "memory_format": torch.preserve_format}), X.double()),
        ((aten.new_full.default, ([2, 1], -math.inf), {"device": torch.device("cpu")}), torch.full((2, 1), -math.inf)),
        ((aten.index.Tensor, ([None, torch.tensor([1, 3])],), {}), X[:, [1, 3]]),
        (
            (lambda x, index, more: x[index] + more["two"], ((slice(None, 3, 2), 1),), {"more": {"two": 2}}),
            X[:3:2, 1] + 2,
        ),
        ((lambda x, name: x + len(name), ('quote " and \\',), {}), X + 13),
        ((lambda x, flag: -x if flag is True else x, (True,), {}), -X),
    ],
    ids=["infinity", "none", "dtype_and_format", "device", "tensors_in_a_list", "slices", "string", "boolean"],
)
def test_arguments_of_every_kind(call, expected) -> None:
    assert_same(emit(graph_module(call))([X]), [expected])


def test_nan_stays_nan() -> None:
    (found,) = emit(graph_module((aten.add.Tensor, (math.nan,), {})))([X])
    assert found.isnan().all()


def test_nodes_within_arguments_are_found_and_freed() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(aten.sin.default, (x,))
    joined = graph.call_function(aten.cat.default, ([y, x, y],), {"dim": 1})
    graph.output([joined])
    run = emit(fx.GraphModule(torch.nn.Module(), graph))
    assert_same(run([X]), [torch.cat([X.sin(), X, X.sin()], 1)])
    assert sorted(lines(run)[-2].removeprefix("del ").split(", ")) == ["a0", "v0"]


def test_attributes_are_constants_of_the_code() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output([graph.call_function(aten.add.Tensor, (x, graph.get_attr("table")))])
    module = torch.nn.Module()
    module.register_buffer("table", torch.ones(6))
    run = emit(fx.GraphModule(module, graph))
    for _ in range(2):
        assert_same(run([X]), [X + 1])


@pytest.fixture
def alike() -> Iterator[list]:
    """Two operators whose names are the same once dots and colons are gone."""
    with torch.library._scoped_library("memopt_test", "FRAGMENT") as first:
        first.define("one_two(Tensor x) -> Tensor")
        first.impl("one_two", lambda x: x + 1, "CompositeExplicitAutograd")
        with torch.library._scoped_library("memopt_test_one", "FRAGMENT") as second:
            second.define("two(Tensor x) -> Tensor")
            second.impl("two", lambda x: x * 10, "CompositeExplicitAutograd")
            yield [torch.ops.memopt_test.one_two.default, torch.ops.memopt_test_one.two.default]


def test_operators_of_like_names_stay_apart(alike) -> None:
    first, second = alike
    run = emit(graph_module((first, (), {}), (second, (), {}), (first, (), {})))
    assert_same(run([X]), [(X + 1) * 10 + 1])


def test_annotated_nodes_write_over_their_operand() -> None:
    program = Inplace().run(trace(lambda x: ((x.sin() * 2).exp().sigmoid(),), X)).program
    run = emit(program.graph_module)
    before = X.clone()
    assert_same(run([X]), [(X.sin() * 2).exp().sigmoid()])
    assert_same(X, before)
    assert X.nbytes <= measure(lambda: run([X])).peak_bytes <= X.nbytes + 16
    assert "_f_aten_exp__default(" in run.source and "_f_aten_sin_default(" in run.source


def test_an_annotation_without_an_overload_is_an_error() -> None:
    module = graph_module((aten.sort.default, (), {}), (operator.getitem, (0,), {}), (aten.cumsum.default, (0,), {}))
    next(node for node in module.graph.nodes if node.name == "cumsum_default").meta["inplace"] = 0
    with pytest.raises(RuntimeError, match=r"cumsum_default is annotated in place, but aten\.cumsum\.default has no"):
        emit(module)


def test_dead_calls_still_run_and_their_results_die_at_once() -> None:
    seen: list[int] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return x + 1

    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(note, (x,))
    graph.output([x])
    run = emit(fx.GraphModule(torch.nn.Module(), graph))
    run([X])
    assert seen == [1] and lines(run)[-2] == "del v0"


class Counts(torch.nn.Module):
    """Several graphs, of which one has a constant and needs no gradients: a metric within a model, say."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = torch.nn.Linear(16, 4), torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        chosen = y.argmax(-1)
        torch._dynamo.graph_break()
        with torch.no_grad():
            weight = torch.ones(4)
            weight[chosen.bincount(minlength=4) == 0] = torch.tensor(0.0)
            self.seen = self.seen + weight
        torch._dynamo.graph_break()
        return y.square().mean()


@pytest.mark.quick("aten")
@pytest.mark.parametrize("engine", ["aten", "inductor"])
def test_constants_of_a_graph_that_is_only_collected_are_no_inputs_of_it(engine) -> None:
    torch.manual_seed(0)
    model = Counts()
    plain = copy.deepcopy(model)
    compiled = memopt.compile(model, "4MB", backend=engine)
    for _ in range(2):
        x = torch.randn(8, 16)
        compiled(x).backward()
        plain(x).backward()
        assert_same(model.seen, plain.seen)
    assert compiled.report.budget_bytes == 4_000_000
    torch.testing.assert_close(model.linear.weight.grad, plain.linear.weight.grad)


@pytest.mark.parametrize("engine", ["static", "inductor"])
def test_a_plan_without_a_run_has_constants_too(engine) -> None:
    report = memopt.plan(Counts().eval(), (torch.randn(8, 16),), "4MB", backend=engine)
    assert report.budget_bytes == 4_000_000


class Resized(torch.nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode, self.first, self.last = mode, torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        for _ in range(2):
            x = torch.nn.functional.interpolate(x, scale_factor=2, mode=self.mode).sin()
        return self.last(x).square().mean()


def test_what_is_resized_is_as_eager_resizes_it_and_takes_no_more_than_that() -> None:
    torch._dynamo.reset()
    x, found = torch.randn(4, 3, 16, 16), {}
    for mode in ("nearest", "bilinear"):
        torch.manual_seed(0)
        model = Resized(mode)
        twin = copy.deepcopy(model)
        loss = memopt.compile(model, 0.9, backend="aten")(x)
        loss.backward()
        wanted = twin(x)
        wanted.backward()
        assert_same([loss, *(p.grad for p in model.parameters())], [wanted, *(p.grad for p in twin.parameters())])
        found[mode] = memopt.plan(twin, (x,)).unconstrained_bytes
    assert found["bilinear"] <= found["nearest"]
