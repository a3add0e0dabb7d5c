"""Tensors lent to a captured program: found while they live and fit, never kept alive."""

from __future__ import annotations

import gc
import weakref

import torch

from memopt.capture.lending import borrowed, lend, position_of
from memopt.compilation.session import Session
from memopt.program import InputKind
from tests.training.steps import make


def captured(monkeypatch):
    """The joint program of a small model, and its input."""
    import memopt

    programs = []
    training = Session.training

    def remember(self, program, graph_break):
        programs.append(program)
        return training(self, program, graph_break)

    monkeypatch.setattr(Session, "training", remember)
    torch._dynamo.reset()
    model, x = make(layers=1)
    memopt.compile(model, backend="aten", verify=False)(x)
    return programs[0], x


def user_inputs(program):
    pairs = zip(program.inputs, program.placeholders, strict=True)
    return [node for entry, node in pairs if entry.kind is InputKind.USER]


def test_the_caller_s_tensor_is_found_by_its_place_and_survives_a_copy(monkeypatch):
    program, x = captured(monkeypatch)
    (node,) = user_inputs(program)
    assert borrowed(node).data_ptr() == x.data_ptr() and not borrowed(node).requires_grad
    (copied,) = user_inputs(program.copy())
    assert borrowed(copied).data_ptr() == x.data_ptr()
    others = [node for node in program.placeholders if node not in user_inputs(program)]
    assert others and all(borrowed(node) is None for node in others)


def test_nothing_is_kept_alive(monkeypatch):
    program, x = captured(monkeypatch)
    (node,) = user_inputs(program)
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert alive() is None and borrowed(node) is None


def test_what_does_not_fit_the_graph_or_is_no_plain_tensor_is_not_used(monkeypatch):
    program, x = captured(monkeypatch)
    (node,) = user_inputs(program)
    for other in (x.t().contiguous().t(), x[:4], x.double(), torch.nn.Parameter(x), x.to("meta")):
        node.meta.pop("memopt_lent")
        given = [None] * (position_of(node) + 1)
        given[position_of(node)] = other
        lend(program, given)
        assert borrowed(node) is None
        node.meta.setdefault("memopt_lent", weakref.ref(other))
