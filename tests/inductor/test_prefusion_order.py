"""arrange: what reads the same values stands between the same two library calls, and numbers stay as they are."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.decomposition import select_decomp_table

from memopt.inductor.kinds import is_library_call
from memopt.inductor.prefusion_order import arrange
from memopt.program import Phase, is_any_view
from tests.passes.build import arguments, capture_joint, trace
from tests.support import assert_same

aten = torch.ops.aten


def weights(*shapes):
    return [(torch.arange(a * b, dtype=torch.float32).reshape(a, b).sin() / b).requires_grad_() for a, b in shapes]


def captured(function, *tensors):
    return capture_joint(function, *tensors, decompositions=select_decomp_table())


def windows(program):
    """Backward's operations, views left out, by the library calls that they stand between."""
    found = [[]]
    for node in program.calls:
        if node.meta["phase"] is not Phase.BACKWARD or is_any_view(node) or node.target is operator.getitem:
            continue
        if is_library_call(node):
            found += [[node], []]
        else:
            found[-1].append(node)
    return [window for window in found if window]


def kinds(program):
    return [[node.target._opname for node in window] for window in windows(program)]


def branches(x, a, b, c):
    """Three products of one value, as queries, keys and values are."""
    x = (x @ a).sin()
    return ((x @ a).square() + (x @ b).square() + (x @ c).square()).sum()


def layers(x, a, b):
    x = F.gelu(x @ a) @ b
    return F.gelu(x @ a).square().sum()


def gated(x, *layers):
    """Layers of the kind that Llama has."""
    for gate, up, down in zip(layers[::3], layers[1::3], layers[2::3], strict=True):
        x = (F.silu(x @ gate) * (x @ up)) @ down
    return x.square().sum()


MODELS = {
    "gated": (gated, lambda: [torch.ones(16, 8, requires_grad=True), *weights(*2 * [(8, 32), (8, 32), (32, 8)])]),
    "branches": (branches, lambda: [torch.ones(16, 8, requires_grad=True), *weights((8, 8), (8, 8), (8, 8))]),
    "layers": (layers, lambda: [torch.ones(16, 8, requires_grad=True), *weights((8, 32), (32, 8))]),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_same_operations_run_after_what_they_read_and_give_the_same_numbers(name):
    function, tensors = MODELS[name]
    given = tensors()
    program = captured(function, *given)
    new = arrange(program)
    new.check()
    assert {node.name for node in new.calls} == {node.name for node in program.calls}
    forward = [node.name for node in new.calls if node.meta["phase"] is Phase.FORWARD]
    assert forward == [node.name for node in program.calls if node.meta["phase"] is Phase.FORWARD]
    values = arguments(program, *given)
    assert_same(program.run(*values), new.run(*values))
    assert [node.name for node in arrange(new).calls] == [node.name for node in new.calls]


def test_gradients_of_one_value_are_added_where_their_sum_is_read():
    program = captured(*(MODELS["branches"][0], *MODELS["branches"][1]()))
    before, after = ([window.count("add") for window in kinds(found)] for found in (program, arrange(program)))
    assert max(before) == 1 and max(after) == 2


def test_a_weight_s_gradient_waits_for_the_kernel_that_reads_what_it_would_compute_again():
    program = captured(*(MODELS["layers"][0], *MODELS["layers"][1]()))

    def place(found):
        order = [node.name for node in found.calls]
        (read,) = next(node for node in found.calls if node.name == "permute_2").all_input_nodes
        assert read.name == "mul_2", "what gelu gave, which the gradient of the second weight reads"
        return order.index("mm_5"), order.index("exp_1")  # the latter is of gelu's own backward

    before, after = place(program), place(arrange(program))
    assert before[0] < before[1] and after[0] > after[1]
    assert after[0] < len(arrange(program).calls) - 3, "no longer than that"


def test_a_gradient_that_is_cast_waits_as_well():
    def under_autocast(*given):
        with torch.autocast("cpu", torch.bfloat16):
            return layers(*given)

    new = arrange(captured(under_autocast, *MODELS["layers"][1]()))
    order = {node.name: index for index, node in enumerate(new.calls)}
    named = {node.name: node for node in new.calls}
    (cast,), (read,) = named["mm_5"].users, named["permute_2"].all_input_nodes
    assert cast.meta["val"].dtype is torch.float32 and read.meta["phase"] is Phase.FORWARD
    assert order["exp_1"] < order["mm_5"] == order[cast.name] - 1, "behind gelu's own backward, and its cast with it"
    assert order[cast.name] < len(order) - 3


def test_programs_without_a_backward_graph_are_returned_as_they_are():
    program = trace(lambda x: (x.sin() @ x,), torch.ones(4, 4))
    assert arrange(program) is program
