"""Sharing: each reason why a copy's storage must not become its original's, and what a merge changes."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from memopt.memory.sharing import Sharing
from memopt.program import Program
from tests.passes.build import capture_joint, trace

X = torch.arange(24.0).reshape(4, 6)


def node(program: Program, name: str) -> fx.Node:
    (found,) = [node for node in program.graph.nodes if node.name == name]
    return found


def against(program: Program, copy: str, original: str) -> str | None:
    return Sharing(program).reason_against(node(program, copy), node(program, original))


def test_an_inner_copy_may_share() -> None:
    program = trace(lambda x: (x.sin().clone().cos(),), X)
    assert against(program, "clone", "sin") is None


def test_an_inner_copy_of_an_input_may_share() -> None:
    assert against(trace(lambda x: (x.clone().cos(),), X), "clone", "x_1") is None


def test_an_output_may_take_over_an_inner_value() -> None:
    assert against(trace(lambda x: (x.sin().clone(),), X), "clone", "sin") is None


def test_an_output_may_not_share_with_an_input() -> None:
    program = trace(lambda x: (x.clone(),), X)
    assert against(program, "clone", "x_1") == (
        "it reaches the caller, and would share memory with the input behind x_1"
    )
    program = trace(lambda x: (x.t().clone()[0],), X)
    assert "the input behind t" in str(against(program, "clone", "t"))


def test_two_outputs_may_not_share() -> None:
    program = trace(lambda x: (lambda y: (y, y.clone()))(x.sin()), X)
    assert against(program, "clone", "sin") == "two outputs would share memory"


def test_a_small_copy_may_not_keep_a_large_storage_alive() -> None:
    program = trace(lambda x: (x.sin()[0].clone().cos(),), X)
    assert against(program, "clone", "select") == "96 bytes would stay alive in place of the copy's 24"


def test_a_small_copy_may_share_what_lives_as_long_anyway() -> None:
    program = trace(lambda x: (lambda y: (y[0].clone().cos() + y.exp()[0],))(x.sin()), X)
    assert against(program, "clone", "select") is None
    program = trace(lambda x: (x[0].clone().cos(),), X)
    assert against(program, "clone", "select") is None


def test_a_merge_makes_the_original_live_as_long_as_the_copy() -> None:
    def function(x):
        y = x.sin()
        first = y[0].clone()  # read last of all
        second = y[1].clone()
        return (second.cos() + first,)

    program = trace(function, X)
    sharing = Sharing(program)
    first, second = node(program, "clone"), node(program, "clone_1")
    select, select_1 = node(program, "select"), node(program, "select_1")
    assert "stay alive" in str(sharing.reason_against(second, select_1))
    sharing.merge(first, select)
    assert sharing.reason_against(second, select_1) is None


def test_a_merge_hands_on_that_the_caller_holds_it() -> None:
    def function(x):
        y = x.sin()
        return y.clone(), y.clone()

    program = trace(function, X)
    sharing = Sharing(program)
    first, second, sin = (node(program, name) for name in ("clone", "clone_1", "sin"))
    assert sharing.reason_against(first, sin) is None
    sharing.merge(first, sin)
    assert sharing.reason_against(second, sin) == "two outputs would share memory"


def test_merges_chain() -> None:
    program = trace(lambda x: (lambda y: (y.clone().clone(), y.exp()))(x.sin()), X)
    sharing = Sharing(program)
    sin, first, second = (node(program, name) for name in ("sin", "clone", "clone_1"))
    sharing.merge(second, first)
    sharing.merge(first, sin)
    # What the caller holds is now sin's storage: an output of its own may not take it any more.
    assert sharing._storage(second) == sharing._storage(sin)
    assert sharing.reason_against(node(program, "exp"), second) == "two outputs would share memory"


# -- training ------------------------------------------------------------------------------------------------------


def crossing_clone(function) -> tuple[Program, fx.Node]:
    program = capture_joint(function, X.clone().requires_grad_())
    (clone,) = [n for n in program.calls if "clone" in str(n.target)]
    return program, clone


def test_what_backward_reads_may_not_share_with_an_input() -> None:
    program, clone = crossing_clone(lambda x: (x.clone().sin(),))
    (argument,) = clone.all_input_nodes
    assert str(Sharing(program).reason_against(clone, argument)) == (
        f"backward reads it, and it would share memory with the input behind {argument.name}"
    )


def test_what_backward_reads_may_not_share_with_an_output() -> None:
    program, clone = crossing_clone(lambda x: (lambda y: (y, y.clone().sin()))(x * 2))
    (argument,) = clone.all_input_nodes
    assert Sharing(program).reason_against(clone, argument) == (
        "backward reads it, and it would share memory with an output"
    )


def test_an_output_may_not_share_with_what_backward_reads() -> None:
    program, clone = crossing_clone(lambda x: (lambda y: (y.clone(), y.sin()))(x * 2))
    (argument,) = clone.all_input_nodes
    assert Sharing(program).reason_against(clone, argument) == (
        "it reaches the caller, and would share memory with a tensor that backward reads"
    )


def test_a_merge_hands_on_that_backward_reads_it() -> None:
    def function(x):
        y = x * 2
        return y.clone(), y.clone().sin()

    program = capture_joint(function, X.clone().requires_grad_())
    returned, read = [n for n in program.calls if "clone" in str(n.target)]
    (original,) = returned.all_input_nodes
    sharing = Sharing(program)
    assert sharing.reason_against(returned, original) is None
    sharing.merge(read, original)
    assert "a tensor that backward reads" in str(sharing.reason_against(returned, original))


def test_higher_order_operators_get_storages_of_their_own() -> None:
    program = trace(lambda x: (x.sin().clone().cos(),), X)
    assert against(program, "clone", "sin") is None
    node(program, "cos").target = torch.ops.higher_order.cond
    assert against(program, "clone", "sin") == "a higher-order operator reads it"


@pytest.mark.parametrize("name", ["sort", "getitem"])
def test_only_single_tensors_are_asked_about(name: str) -> None:
    program = trace(lambda x: (torch.sort(x)[0].clone().cos(),), X)
    if name == "sort":
        with pytest.raises(ValueError, match="too many values"):
            against(program, "clone", name)
    else:
        assert against(program, "clone", name) is None
