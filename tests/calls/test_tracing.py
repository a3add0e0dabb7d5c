"""What runs a graph of a step: what it tells the session, and whose memory it has."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import memopt
from memopt.calls.sessions import Sessions
from memopt.calls.tracing import _noted
from memopt.compilation import session
from memopt.cuda_graphs.pool import GraphPool
from memopt.step.earlier_calls import Figures
from memopt.step.graph_peaks import GraphPeaks


class Pool(GraphPool):
    """Notes when its memory is given back."""

    def __init__(self):
        super().__init__(None)
        self.released = 0

    def release(self):
        self.released += 1


@pytest.mark.parametrize("engine", ["aten", "inductor"])
@pytest.mark.parametrize("dynamic", [False, None])
def test_a_step_of_another_size_has_the_memory_of_cuda_graphs(engine, dynamic, monkeypatch, fresh_dynamo):
    pool = Pool()
    monkeypatch.setattr(Sessions, "_graph_pool_here", lambda self: pool)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    run = memopt.compile(model, "1MB", backend=engine, dynamic=dynamic)
    for rows in (12, 6, 12, 6):
        run(torch.ones(rows, 8)).square().sum().backward()
    for rows in (12, 6, 12, 5):
        before = pool.released
        run(torch.ones(rows, 8)).square().sum().backward()
        assert pool.released > before


@pytest.mark.parametrize(("available", "released"), [(1125, 0), (1124, 1), (None, 1)])
def test_they_stay_where_there_is_room_beside_them(available, released, monkeypatch):
    monkeypatch.setattr(session, "limit_available_bytes", lambda: available)
    peaks, pool = GraphPeaks(forward=1000, backward=900, saved=0, left=0), Pool()
    session.Session.makes_way(SimpleNamespace(graph_pool=pool), Figures(peaks, peaks, 0, "", None))
    assert pool.released == released


@pytest.mark.parametrize("gain", [None, "time"])
def test_a_step_that_is_captured_claims_it_itself(gain):
    said = []
    told = SimpleNamespace(
        budget=1, figures=lambda captured: "graph", runs=said.append, makes_way=lambda graph: said.append(graph)
    )
    hooks = SimpleNamespace(needs_gradients=True, captured=None, graph_gain=gain)
    assert _noted(lambda x: x + 1, told, hooks)(1) == 2
    assert said == ["graph"] * (2 if gain is None else 1)
