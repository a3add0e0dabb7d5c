"""Values of nodes, found on fake tensors."""

import pytest
import torch

from memopt.graph.propagation import ProgramError, fake_mode, propagate, run_fake
from tests.support import capture

aten = torch.ops.aten


@pytest.fixture
def program():
    return capture(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU()), torch.ones(2, 3)).copy()


def added(program, target, *args):
    with program.graph.inserting_before(next(node for node in program.graph.nodes if node.op == "output")):
        return program.graph.call_function(target, args)


def test_a_new_node_gets_its_value_and_others_keep_theirs(program):
    last = program.calls[-1]
    kept = last.meta["val"]
    node = added(program, aten.sum.dim_IntList, last, [1])
    propagate(program.graph_module)
    assert node.meta["val"].shape == (2,) and last.meta["val"] is kept
    assert node.meta["val"].fake_mode is fake_mode(program.graph_module)


def test_what_is_stale_is_made_again_where_that_is_asked_for(program):
    last = program.calls[-1]
    last.meta["val"] = last.meta["val"].new_empty(7)
    propagate(program.graph_module)
    assert last.meta["val"].shape == (7,)
    propagate(program.graph_module, refresh=True)
    assert last.meta["val"].shape == (2, 4)


def test_a_view_shares_the_memory_that_it_shows(program):
    last = program.calls[-1]
    node = added(program, aten.view.default, last, [8])
    values = run_fake(program.graph_module)
    assert values[node].untyped_storage() == values[last].untyped_storage()


def test_what_refuses_its_operands_is_named(program):
    node = added(program, aten.view.default, program.calls[-1], [9])
    with pytest.raises(ProgramError, match=f"{node.name}: "):
        run_fake(program.graph_module)
