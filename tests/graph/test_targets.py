from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from memopt.graph import targets

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("target", "draws", "pointwise", "views"),
    [
        (aten.add.Tensor, False, True, False),
        (aten.view.default, False, False, True),
        (aten.mm.default, False, False, False),
        (aten.native_dropout.default, True, False, False),
        (operator.getitem, False, False, False),
    ],
)
def test_an_operator_is_what_torch_says_of_it(target: object, draws: bool, pointwise: bool, views: bool) -> None:
    found = targets.draws(target), targets.is_pointwise(target), targets.gives_views(target)
    assert found == (draws, pointwise, views)


def test_effects_are_asked_for_once_of_torch_s_own_operators_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_effects", {})
    graph = fx.Graph()
    x = graph.placeholder("x")
    own = graph.call_function(aten.add_.Tensor, (x, x))
    with torch.library._scoped_library("memopt_test_targets", "DEF") as library:
        library.define("f(Tensor x) -> Tensor")
        other = graph.call_function(torch.ops.memopt_test_targets.f.default, (x,))
        asked: list[fx.Node] = []
        is_impure = fx.Node.is_impure

        def counted(node: fx.Node) -> bool:
            asked.append(node)
            return is_impure(node)

        monkeypatch.setattr(fx.Node, "is_impure", counted)
        assert [targets.is_impure(node) for node in (own, own, other, other)] == [True, True, False, False]
        assert asked == [own, other, other]


def test_what_waits_for_other_ranks_does_more_than_compute_its_value() -> None:
    functional = pytest.importorskip("torch.distributed._functional_collectives")
    assert functional is not None
    graph = fx.Graph()
    x = graph.placeholder("x")
    reduce = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "0"))
    plain = graph.call_function(torch.ops.aten.sin.default, (x,))
    assert targets.is_collective(reduce.target) and targets.is_impure(reduce)
    assert not targets.is_collective(plain.target) and not targets.is_collective(operator.getitem)
