"""KeepOrder: no fusion moves a node past a library call."""

from types import SimpleNamespace

import pytest
import torch
from torch._inductor import config
from torch._inductor.choices import InductorChoices
from torch._inductor.scheduler import ExternKernelSchedulerNode
from torch._inductor.virtualized import V

from memopt.inductor.order import ADDED, KeepOrder


def node(order, *, library=False, added=False):
    made = object.__new__(ExternKernelSchedulerNode) if library else SimpleNamespace()
    made.min_order = order
    if not library:
        origin = SimpleNamespace(meta={ADDED: True} if added else {})
        made.get_nodes = lambda: [SimpleNamespace(node=SimpleNamespace(get_origins=lambda: [origin]))]
    return made


def scheduler(*calls):
    return SimpleNamespace(nodes=[node(order, library=True) for order in calls] + [node(1), node(4)])


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
