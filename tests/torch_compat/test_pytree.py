"""Tensors in nestings of containers."""

import collections
import dataclasses

import pytest
import torch
from torch.utils import _pytree

from memopt.torch_compat import pytree

Pair = collections.namedtuple("Pair", "a b")


def test_what_is_taken_apart_is_put_together_again():
    nested = {"x": [torch.ones(2), 3], "y": Pair(None, (4,))}
    leaves, spec = pytree.tree_flatten(nested)
    assert leaves[1:] == [3, None, 4] and pytree.tree_leaves(nested)[1:] == leaves[1:]
    assert pytree.tree_structure(nested) == spec
    assert pytree.tree_unflatten([1, 2, 3, 4], spec) == {"x": [1, 2], "y": Pair(3, (4,))}
    places, _ = pytree.tree_flatten_with_path({"x": [5]})
    assert [(str(place[0]), value) for place, value in places] == [("['x']", 5)]


def test_what_is_mapped_keeps_its_containers():
    assert pytree.tree_map(lambda value: value + 1, Pair(1, [2])) == Pair(2, [3])
    assert pytree.tree_map_only(int, str, ("a", 1.5, 2)) == ("a", 1.5, "2")


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    others: list


@pytest.fixture
def registered():
    _pytree.register_dataclass(Output)
    yield
    _pytree._deregister_pytree_node(Output)


X = torch.zeros(2)


@pytest.mark.parametrize(
    "tree",
    [
        X,
        None,
        ((X, 1), {"b": [X, None, "name"], "a": 2.0}),
        Pair(X, [Pair(1, X), ()]),
        collections.OrderedDict(b=X, a=[1]),
        collections.defaultdict(list, b=[X]),
        Output(X, [X, {"a": Pair(X, 3)}]),
        [torch.Size([2, 3]), {1, 2}, object, slice(1, 2)],
        {3: X, 1: (X,)},
    ],
)
def test_leaves_are_torchs_in_its_order(registered, tree):
    found, wanted = pytree.tree_leaves(tree), _pytree.tree_leaves(tree)
    assert list(map(id, found)) == list(map(id, wanted))
    found, wanted = (each.tree_leaves(tree, dataclasses.is_dataclass) for each in (pytree, _pytree))
    assert list(map(id, found)) == list(map(id, wanted))
