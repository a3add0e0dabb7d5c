"""Graphs that Dynamo captures again are told from others by all that their code depends on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn

from memopt.capture.same_graph import description


def captured(function: Callable[..., Any], *args: torch.Tensor) -> tuple[fx.GraphModule, Sequence[Any]]:
    """The graph of a function, and what it was captured with."""
    found: list[tuple[fx.GraphModule, Sequence[Any]]] = []

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        found.append((graph, inputs))
        return graph.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=False)(*args)
    return found[0]


def told(function: Callable[..., Any], *args: torch.Tensor) -> Any:
    """The description of a function's graph."""
    return description(*captured(function, *args))


def plain(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x).sum(1)


X = torch.ones(3, 4)


def test_the_same_graph_is_the_same_whatever_is_in_its_inputs() -> None:
    assert told(plain, X) == told(lambda x: plain(x), 2 * X) is not None


@pytest.mark.parametrize(
    ("function", "value"),
    [
        (lambda x: plain(x) + 1, X),
        (lambda x: torch.nn.functional.gelu(x).sum(0), X),
        (lambda x: torch.nn.functional.gelu(x, approximate="tanh").sum(1), X),
        (lambda x: torch.nn.functional.relu(x).sum(1), X),
        (plain, torch.ones(4, 3).t()),
        (plain, torch.ones(3, 5)),
        (plain, X.double()),
        (plain, torch.ones(3, 4, requires_grad=True)),
        (plain, torch.ones(4, 4)[1:]),
    ],
)
def test_graphs_and_inputs_that_differ_are_told_apart(function: Callable[..., Any], value: torch.Tensor) -> None:
    assert told(function, value) not in (None, told(plain, X))


def test_inputs_that_share_memory_are_told_from_such_that_do_not() -> None:
    graph, inputs = captured(lambda x, y: x.sin() + y.cos(), X, X.clone())
    shared = X[:]
    assert description(graph, inputs) != description(graph, [shared, shared.view(3, 4)])


def test_settings_are_part_of_it() -> None:
    graph, inputs = captured(plain, X)
    before = description(graph, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        assert description(graph, inputs) != before
    with torch.no_grad():
        assert description(graph, inputs) != before
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert description(graph, inputs) != before
    assert description(graph, inputs) == before


def test_settings_that_torch_does_not_tell_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def mixed() -> str:
        raise RuntimeError("mix of the legacy and new APIs")

    graph, inputs = captured(plain, X)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", mixed)
    assert description(graph, inputs) is None


def test_integers_that_equal_floats_and_flags_are_told_apart() -> None:
    one, flag, real = (told(lambda x, n=n: x.mul(n), X) for n in (1, True, 1.0))
    assert len({repr(found) for found in (one, flag, real)}) == 3 and one != real and one != flag


def test_what_cannot_be_compared_is_not_known() -> None:
    constant = torch.arange(4.0)

    class Holds(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.add, (x, graph.get_attr("constant"))))
    root = nn.Module()
    root.register_buffer("constant", constant)
    assert description(fx.GraphModule(root, graph), [X]) is None
    graph, x = fx.Graph(), None
    module = nn.Module()
    module.add_module("inner", Holds())
    graph.output(graph.call_module("inner", (graph.placeholder("x"),)))
    assert description(fx.GraphModule(module, graph), [X]) is None
    sized, _ = captured(plain, X)
    assert description(sized, [3]) is None and description(sized, [X.to_sparse()]) is None


def test_what_a_checkpoint_runs_is_part_of_it() -> None:
    def within(part: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False).sum()

    x = X.clone().requires_grad_()
    sine, again, cosine = (told(within(part), x) for part in (torch.sin, torch.sin, torch.cos))
    assert sine == again is not None and cosine not in (None, sine)
