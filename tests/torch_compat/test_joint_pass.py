"""Passes over Inductor's graphs."""

import copy
import pickle

import pytest
import torch
from torch._inductor import config

from memopt.torch_compat.joint_pass import (
    after_joint_passes,
    before_joint_passes,
    before_lowering,
    before_passes_of_graphs,
)


def edit(graph):
    graph.edited = True


@pytest.mark.parametrize("when", [before_joint_passes, after_joint_passes, before_passes_of_graphs, before_lowering])
def test_a_setting_edits_graphs_and_tells_its_versions_apart(when):
    ((name, one),) = when(edit, "1").items()
    graph = torch.fx.Graph()
    one(graph)
    assert graph.edited and hasattr(config, name)
    (other,) = when(edit, "2").values()
    assert one.uuid() == pickle.loads(pickle.dumps(one)).uuid() != other.uuid()
    assert copy.deepcopy(one) is one
    with config.patch({name: other}):
        assert when(edit, "1") == {}, "the user's own stays"


def test_each_has_a_place_of_its_own():
    every = [before_joint_passes, after_joint_passes, before_passes_of_graphs, before_lowering]
    assert len({name for when in every for name in when(edit, "1")}) == 4
