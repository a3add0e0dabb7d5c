"""Methods of a model that are called on its stand-in run eagerly; within a budget a line says so."""

from __future__ import annotations

import inspect
import logging
import pickle
import types

import pytest
import torch
from torch import nn

import memopt

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


X = torch.linspace(-1, 1, 32).reshape(4, 8)


class Auto(nn.Module):
    """An autoencoder with methods that run its parts, or only its weights, and others that do not."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 3), nn.Linear(3, 8)
        self.cache = None

    def forward(self, x):
        return self.decoder(self.encode(x))

    def encode(self, x):
        """Features."""
        return self.encoder(x)

    def reconstruct(self, x):
        return self(x)

    def project(self, x):
        return x @ self.encoder.weight.t()

    def cached(self, x):
        if self.cache is None:
            self.cache = x * 2
            return self.cache
        return self.encoder(self.cache)

    def loss(self, found, x):
        return (found - x).square().mean()

    def count(self):
        return sum(each.numel() for each in self.parameters())

    def head(self):
        return self.decoder


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("name", "gradients"),
    [("encode", True), ("encode", False), ("reconstruct", True), ("reconstruct", False), ("project", True)],
)
def test_a_method_that_runs_the_model_s_parts_is_named_once_with_the_way_out(name, gradients, caplog):
    model = Auto()
    run = memopt.compile(model, "1MB", backend="aten")
    with torch.set_grad_enabled(gradients):
        for _ in range(3):
            assert torch.equal(getattr(run, name)(X), getattr(model, name)(X))
    (line,) = lines(caplog)
    assert f"Auto.{name} runs eagerly" in line and "memopt.compile a module whose forward calls it" in line
    with pytest.raises(RuntimeError, match=f"nothing is planned: Auto.{name}"):
        _ = run.report
    run(X)
    assert any(f"Auto.{name} runs eagerly" in note for note in run.report.notes)


def test_what_runs_none_of_them_is_not(caplog):
    run = memopt.compile(Auto(), "1MB", backend="aten")
    found = run(X)
    run.loss(found, X).backward()
    assert run.count() == 8 * 3 + 3 + 3 * 8 + 8 and isinstance(run.head(), nn.Linear)
    assert not lines(caplog)


def test_a_method_that_runs_them_later_is_named_then(caplog):
    run = memopt.compile(Auto(), "1MB", backend="aten")
    run.cached(X)
    assert not lines(caplog)
    run.cached(X)
    assert "Auto.cached" in lines(caplog)[0]


def test_without_a_budget_nothing_is_said(caplog):
    run = memopt.compile(Auto(), backend="aten")
    run.encode(X)
    assert not lines(caplog) and run.encode.__func__ is Auto.encode


def test_it_is_the_model_s_method_to_who_asks():
    model = Auto()
    run = memopt.compile(model, "1MB", backend="aten")
    assert (
        isinstance(run.encode, types.MethodType) and run.encode.__self__ is model and run.encode.__doc__ == "Features."
    )
    assert list(inspect.signature(run.encode).parameters) == ["x"]
    assert torch.equal(pickle.loads(pickle.dumps(run.encode))(X), model.encode(X))
    compiled = torch.compile(run.encode, backend="eager", fullgraph=True)
    assert torch.equal(compiled(X), model.encode(X))
    model.encode = lambda x: x + 1  # one of the object's own is no method
    assert torch.equal(run.encode(X), X + 1)


def test_an_error_of_the_method_leaves_no_hook():
    run = memopt.compile(Auto(), "1MB", backend="aten")
    before = len(nn.modules.module._global_forward_pre_hooks)
    with pytest.raises(RuntimeError):
        run.encode(X[:, :3])
    assert len(nn.modules.module._global_forward_pre_hooks) == before
