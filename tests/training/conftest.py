import pytest
import torch

from memopt.solve import apart


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _short_searches(monkeypatch):
    """A step must stay inside whatever plan was found: how good the plan is, tests/solve asks."""
    search = apart.curve
    monkeypatch.setattr(apart, "curve", lambda problem, *, seconds: search(problem, seconds=min(seconds, 0.5)))
