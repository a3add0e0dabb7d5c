"""Inductor's hook for the joint graph: what cuts it, what stands for it in keys of caches, what the graphs pass on."""

import contextlib
import copy
import pickle

import pytest
import torch
from torch import fx

from memopt.capture.dynamo import Hooks
from memopt.capture.handed import Handed
from memopt.inductor.partition import (
    IN_ANY_ORDER,
    IN_ORDER,
    Partition,
    compile_training,
    free_at_once,
    in_order,
    saved_bytes,
)
from memopt.inductor.postplan_reorder import together as order_together
from tests.inductor.test_postplan_reorder import planned, together


def test_the_plan_cuts_the_graph_whatever_compiler_asks():
    asked = []
    partition = Partition(lambda joint, inputs, **options: asked.append((joint, inputs, options)) or ("f", "b"))
    assert partition("joint", [1], compiler="inductor", num_fwd_outputs=2) == ("f", "b")
    assert asked == [("joint", [1], {"num_fwd_outputs": 2})]


def test_keys_of_caches_hold_nothing_of_a_plan_but_how_its_code_is_fused():
    partition = Partition(lambda *given: None)  # which cannot be pickled
    assert copy.deepcopy({"hook": partition})["hook"] is partition
    assert pickle.loads(pickle.dumps(partition)) is None
    assert partition.uuid() == IN_ANY_ORDER
    partition.token = IN_ORDER
    assert partition.uuid() == IN_ORDER != IN_ANY_ORDER


def test_what_forward_leaves_for_backward_is_counted_by_storage():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(8)
    made, view = graph.call_function(torch.exp, (x,)), graph.call_function(torch.t, (x,))
    made.meta["val"] = torch.empty(100)
    view.meta["val"] = made.meta["val"][:10]
    other = graph.call_function(torch.sin, (x,))
    other.meta["val"] = torch.empty(25)
    graph.output((other, made, view, x, None, other))
    module = fx.GraphModule({}, graph)
    assert saved_bytes(module, 1) == 400 + 100, "a view counts with its base, an input is there anyway"
    assert saved_bytes(module, 6) == 0


@pytest.mark.usefixtures("_compiler")
def test_both_graphs_are_lowered_at_once_and_cut_as_asked():
    from torch._functorch.partitioners import default_partition
    from torch._inductor.compile_fx import compile_fx_inner

    lowered, cuts = [], []

    def inner(module, example_inputs, **options):
        lowered.append(bool(options.get("is_backward")))
        return compile_fx_inner(module, example_inputs, **options)

    def cut(joint, inputs, **options):
        cuts.append(joint)
        return default_partition(joint, inputs, **options)

    def backend(graph_module, example_inputs):
        run = compile_training(graph_module, example_inputs, inner, Partition(cut))
        assert lowered == [False, True], "before the first call"
        return run

    x = torch.randn(4, 4, requires_grad=True)
    function = lambda x: (x.sin() * x).sum()  # noqa: E731
    torch.compile(function, backend=backend)(x).backward()
    found, x.grad = x.grad, None
    function(x).backward()
    torch.testing.assert_close(found, x.grad)
    assert len(cuts) == 1


@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize("at_once", [False, True])
def test_a_buffer_waits_for_another_of_its_size_unless_it_is_freed_at_once(at_once):
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    x = torch.randn(64, 64)
    chain = torch.compile(lambda x: x @ x @ x @ x @ x)
    with contextlib.ExitStack() as policy:
        if at_once:
            free_at_once(policy)
        found, (source,) = run_and_get_code(chain, x)
    assert ("# reuse" in source) is not at_once
    torch.testing.assert_close(found, x @ x @ x @ x @ x)


def test_a_graph_in_another_order_is_what_the_program_in_that_order_is_cut_into():
    program = planned({"mm", "mm_1", "div", "mul"})[2]
    other = together(program)
    hooks = Hooks.__new__(Hooks)
    hooks.handed, hooks.graph_break = Handed(), False
    (forward, backward), graphs = (hooks.cut(item, item.forward_outputs) for item in (program, other))
    moved = in_order(backward, [node.name for node in order_together(program)])

    def described(module):
        return [(node.format_node(), node.meta.get("val"), sorted(node.meta)) for node in module.graph.nodes]

    assert described(forward) == described(graphs[0])
    assert described(moved) == described(graphs[1]) != described(backward)
    assert moved.graph.output_node().meta.keys() == graphs[1].graph.output_node().meta.keys()
    moved.graph.lint()
