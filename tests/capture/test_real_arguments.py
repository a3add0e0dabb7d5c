"""The caller's tensors for a captured program: found while they live and fit, never kept alive."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from memopt.capture.real_arguments import note_arguments, position_of, real_argument
from memopt.compilation.session import Session
from memopt.program import InputKind
from tests.training.steps import make


def captured(monkeypatch, model=None, x=None):
    """The joint program of a small model, and its input."""
    import memopt

    if model is None:
        model, x = make(layers=1)
    programs = []
    training = Session.training

    def remember(self, program, *others):
        programs.append(program)
        return training(self, program, *others)

    monkeypatch.setattr(Session, "training", remember)
    torch._dynamo.reset()
    memopt.compile(model, backend="aten", verify=False)(x)
    return programs[0], x


def user_inputs(program):
    pairs = zip(program.inputs, program.placeholders, strict=True)
    return [node for entry, node in pairs if entry.kind is InputKind.USER]


def test_the_caller_s_tensor_is_found_by_its_place_and_survives_a_copy(monkeypatch):
    program, x = captured(monkeypatch)
    (node,) = user_inputs(program)
    assert real_argument(node).data_ptr() == x.data_ptr() and not real_argument(node).requires_grad
    (copied,) = user_inputs(program.copy())
    assert real_argument(copied).data_ptr() == x.data_ptr()
    others = [node for node in program.placeholders if node not in user_inputs(program)]
    assert others and all(real_argument(node) is None for node in others)


class Within(torch.nn.Linear):
    """Of a tensor of a class of its own."""

    def forward(self, x):
        return super().forward(x).tanh()


@pytest.mark.parametrize("kind", ["jagged", "two"])
def test_what_a_tensor_of_a_class_of_its_own_holds_is_found(kind, monkeypatch):
    values = torch.randn(6, 4)
    if kind == "jagged":
        x = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 2, 6]))
        held = [x._values, x._offsets]
    else:
        held = [values, torch.ones(6, 4)]
        x = TwoTensor(*held)
    program, _ = captured(monkeypatch, Within(4, 4), x)
    found = [real_argument(node) for node in user_inputs(program)]
    places = {tensor.data_ptr() for tensor in found if tensor is not None}
    assert {tensor.data_ptr() for tensor in held} <= places


def test_nothing_is_kept_alive(monkeypatch):
    program, x = captured(monkeypatch)
    (node,) = user_inputs(program)
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert alive() is None and real_argument(node) is None


def test_what_does_not_fit_the_graph_or_is_no_plain_tensor_is_not_used(monkeypatch):
    program, x = captured(monkeypatch)
    (node,) = user_inputs(program)
    for other in (x.t().contiguous().t(), x[:4], x.double(), torch.nn.Parameter(x), x.to("meta")):
        node.meta.pop("memopt_argument")
        given = [None] * (position_of(node) + 1)
        given[position_of(node)] = other
        note_arguments(program, given)
        assert real_argument(node) is None
        node.meta.setdefault("memopt_argument", weakref.ref(other))
