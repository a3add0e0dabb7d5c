"""KeepOrder: no fusion moves a node past a library call."""

from types import SimpleNamespace

import pytest
import torch
from torch import fx
from torch._inductor import config
from torch._inductor.choices import InductorChoices
from torch._inductor.scheduler import ExternKernelSchedulerNode
from torch._inductor.virtualized import V

from memopt.inductor.order import ADDED, KeepOrder


def node(order, *origins, library=False, added=False):
    made = object.__new__(ExternKernelSchedulerNode) if library else SimpleNamespace()
    made.min_order = made.max_order = order
    if not origins:
        origins = [fx.Graph().placeholder("x")]
        origins[0].meta.update({ADDED: True} if added else {})
    made.get_nodes = lambda: [SimpleNamespace(node=SimpleNamespace(get_origins=lambda: origins))]
    return made


def scheduler(*calls):
    return SimpleNamespace(nodes=[node(order, library=True) for order in calls] + [node(1), node(4)])


@pytest.fixture(autouse=True)
def graph():
    """Eight nodes of the graph that is lowered."""
    graph = fx.Graph()
    found = [graph.placeholder(name) for name in "abcdefgh"]
    with V.set_graph_handler(SimpleNamespace(graph=graph)):
        yield found


@pytest.fixture(autouse=True)
def _inductor_allows_all(monkeypatch):
    for name in ("can_fuse_horizontal", "can_fuse_vertical"):
        monkeypatch.setattr(InductorChoices, name, staticmethod(lambda *given: True))


@pytest.mark.parametrize("kind", ["can_fuse_horizontal", "can_fuse_vertical"])
def test_nodes_are_fused_only_where_no_call_stands_between(kind):
    fuse, planned = getattr(KeepOrder(), kind), scheduler(3, 7)
    assert not fuse(planned, node(1), node(4), 0)
    assert not fuse(planned, node(4), node(1), 0)
    assert fuse(planned, node(1), node(2), 0) and fuse(planned, node(4), node(6), 0)
    assert fuse(planned, node(3), node(5), 0), "the call itself and its reader"


@pytest.mark.parametrize("kind", ["can_fuse_horizontal", "can_fuse_vertical"])
def test_what_rewrites_added_alone_may_be_kept_apart(kind):
    fuse, planned = getattr(KeepOrder(added_only=True), kind), scheduler(3)
    assert not fuse(planned, node(1, added=True), node(4, added=True), 0)
    assert fuse(planned, node(1, added=True), node(4), 0) and fuse(planned, node(1), node(4), 0)
    assert fuse(planned, node(1, added=True), node(2, added=True), 0)


def test_what_inductor_refuses_stays_refused(monkeypatch):
    monkeypatch.setattr(InductorChoices, "can_fuse_vertical", staticmethod(lambda *given: False))
    assert not KeepOrder().can_fuse_vertical(scheduler(), node(1), node(2), 0)


def test_calls_are_looked_up_anew_for_another_graph():
    choices, first, second = KeepOrder(), scheduler(3), scheduler()
    assert not choices.can_fuse_vertical(first, node(1), node(4), 0)
    assert choices.can_fuse_vertical(second, node(1), node(4), 0)


def test_what_stands_together_in_the_graph_may_be_scheduled_apart(graph):
    a, b, call, other, c, after, *_ = graph  # each of a and b is scheduled where a call needs it
    planned = scheduler()
    planned.nodes = [node(0, a), node(1, call, library=True), node(2, b), node(3, other, library=True), node(4, c)]
    first, _, second, _, third = planned.nodes
    fuse = KeepOrder().can_fuse_horizontal
    assert fuse(planned, first, second, 0) and fuse(planned, second, first, 0)
    assert not fuse(planned, second, third, 0) and not fuse(planned, first, third, 0)
    assert not fuse(planned, first, node(2), 0), "not known where it stands"
    assert fuse(planned, third, node(5, a, after), 0), "what is computed within does not count"


def test_what_is_scheduled_together_may_stand_apart_in_the_graph(graph):
    a, call, b, *_ = graph
    planned = scheduler()
    planned.nodes = [node(0, call, library=True), node(1, a), node(2, b)]
    both = SimpleNamespace(
        min_order=1, max_order=2, get_nodes=lambda: [part.get_nodes()[0] for part in planned.nodes[1:3]]
    )
    fuse = KeepOrder().can_fuse_vertical
    assert fuse(planned, planned.nodes[1], planned.nodes[2], 0)
    assert fuse(planned, both, node(3, b), 0)
    planned.nodes.append(node(3, graph[3], library=True))
    assert not KeepOrder().can_fuse_vertical(planned, both, node(4, b), 0), "of its parts one stands apart in either"


@pytest.mark.usefixtures("_compiler")
def test_a_value_that_several_calls_read_apart_is_computed_with_its_neighbours():
    """Inductor schedules each of three values directly before the product that reads it: they are one kernel."""
    schedulers = []

    class Seen(KeepOrder):
        def _apart(self, scheduler, node1, node2):
            schedulers.append(scheduler)
            return super()._apart(scheduler, node1, node2)

    def function(x, y, w):
        a, b, c = x.sin() * y, x.cos() * y, x * y.sin()
        return a @ w, b @ w, c @ w

    x, y, w = torch.randn(3, 16, 16, dtype=torch.float64)
    with V.set_choices_handler(Seen()), config.patch(fx_graph_cache=False, reorder_for_locality=False):
        found = torch.compile(function)(x, y, w)
    kinds = [isinstance(part, ExternKernelSchedulerNode) for part in schedulers[-1].nodes]
    assert kinds == [False, True, True, True]
    torch.testing.assert_close(found, function(x, y, w))


@pytest.mark.usefixtures("_compiler")
def test_inductor_asks_it_and_computes_the_same(monkeypatch):
    monkeypatch.undo()
    asked = []
    apart = KeepOrder._apart
    monkeypatch.setattr(KeepOrder, "_apart", lambda *given: asked.append(apart(*given)) or asked[-1])

    def function(x, w):
        return (x.relu() * 2) @ w + x.exp()

    x, w = torch.randn(8, 8), torch.randn(8, 8)
    with V.set_choices_handler(KeepOrder()), config.patch(fx_graph_cache=False):
        found = torch.compile(function)(x, w)
    assert asked
    torch.testing.assert_close(found, function(x, w))
