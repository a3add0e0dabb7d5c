"""Which operators stay, which are written out in others, and what is said of those that are neither."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("jax")
if importlib.util.find_spec("torchax") is None:  # importing it would rename a device of PyTorch's
    pytest.skip("needs torchax", allow_module_level=True)

from memopt.torch_compat import decompositions
from memopt.xla import legalize as legalizing
from memopt.xla.legalize import legalize, where
from memopt.xla.table import LOWERINGS, LowerError

aten = torch.ops.aten


def graph(target: Any, *args: Any, outputs: Callable[[fx.Node], Any] = lambda node: node) -> fx.GraphModule:
    """A graph of one call on a fake tensor of shape (2, 3)."""
    made = fx.Graph()
    x = made.placeholder("x")
    with FakeTensorMode():
        x.meta["val"] = torch.empty(2, 3)
        node = made.call_function(target, (x, *args), name="called")
        node.meta = {"val": target(x.meta["val"], *args), "stack_trace": 'File "m.py", line 7, in f\n    y = f(x)'}
    made.output([outputs(node)])
    return fx.GraphModule({}, made)


def targets(module: fx.GraphModule) -> list[Any]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def test_what_has_a_lowering_stays_with_its_name() -> None:
    given = graph(aten.tanh.default)
    found = legalize(given)
    assert found is not given and targets(found) == [aten.tanh.default]
    (node,) = [node for node in found.graph.nodes if node.op == "call_function"]
    assert node.name == "called" and node.meta["val"].shape == (2, 3)


def test_what_has_none_is_written_out_at_the_source_line_of_the_whole() -> None:
    found = legalize(graph(aten.mish.default))
    assert aten.mish.default not in targets(found) and len(targets(found)) > 1
    calls = [node for node in found.graph.nodes if node.op == "call_function"]
    assert all(node.target in LOWERINGS for node in calls)
    assert all("m.py" in node.meta["stack_trace"] for node in calls)


def test_what_only_checks_is_left_out() -> None:
    made = fx.Graph()
    x = made.placeholder("x")
    with FakeTensorMode():
        x.meta["val"] = torch.empty(2)
    check = made.call_function(aten._assert_tensor_metadata.default, (x, None, None, torch.float32))
    check.meta["val"] = None
    made.output([x])
    assert targets(legalize(fx.GraphModule({}, made))) == []


@pytest.mark.parametrize(("message", "said"), [("", "ValueError"), ("no\nmore", "no"), ("\n\n late", "late")])
def test_a_decomposition_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch, message: str, said: str) -> None:
    def fails(*args: Any) -> Any:
        raise ValueError(message)

    monkeypatch.setitem(decompositions.decomposition_table, aten.mish.default, fails)
    monkeypatch.setattr(legalizing, "torchax_lowering", lambda target: None)
    with pytest.raises(LowerError) as caught:
        legalize(graph(aten.mish.default))
    assert str(caught.value).endswith(f"has no form under XLA: {said}") and "\n" not in str(caught.value)
    assert "aten.mish.default" in str(caught.value) and "m.py:7" in str(caught.value)


def test_a_node_without_a_source_line() -> None:
    made = fx.Graph()
    assert where(made.placeholder("x")) == "x (source unknown)"
