"""Tensors in nestings of containers."""

import collections

import torch

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
