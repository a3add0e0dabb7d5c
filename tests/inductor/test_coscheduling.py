"""What is stored of a program, and which kernels are computed beside a window's."""

import torch

from memopt.inductor.coscheduling import Beside, StoredReads
from memopt.program import Phase
from tests.inductor.test_prefusion_order import captured

aten = torch.ops.aten


def step():
    """Backward reads the same saved values for the gradient of the input and for that of a weight."""
    x, a = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    return captured(lambda x, a: ((x @ a).sin() @ a).square().sum(), x, a)


def test_inputs_and_outputs_stay_and_products_are_no_kernels():
    program = step()
    stored = StoredReads(program)
    products = {node for node in program.calls if node.target is aten.mm.default}
    assert products and not products & stored.kernels and products <= set(stored.sizes)
    assert all(stored.sizes[node] >= 64 * 64 * 4 for node in products)
    given = {node for node in program.placeholders if node.users and "tangents" not in node.name}
    assert given and given <= stored.stays


def test_a_kernel_that_reads_what_a_window_reads_is_computed_beside_it_or_is_not_due():
    program = step()
    stored, place = StoredReads(program), {}
    phase = [node for node in program.calls if node.meta["phase"] is Phase.BACKWARD]
    place.update((node, number) for number, node in enumerate(phase))
    done = set(program.graph.nodes) - set(phase)
    kernels = [node for node in phase if node in stored.kernels]
    assert kernels
    for kernel in kernels:
        found = Beside(stored).found([kernel], done | {kernel}, place)
        assert found == sorted(found, key=place.__getitem__) and kernel not in found
        there = done | {kernel, *found}
        assert all(value not in place or value in there for node in found for value in stored.operands[node])
    assert Beside(stored).found([], done, place) == []
