"""A loss in chunks where the columns of the logits are padded."""

import pytest
import torch

from memopt.passes.chunk_loss import ChunkLoss
from tests.passes.build import capture_joint, reasons
from tests.passes.test_chunk_loss import (
    FORMS,
    LOSSES,
    RETURNED,
    ROWS,
    WIDTH,
    assert_as_exact,
    data,
    largest,
    products_of,
)
from tests.support import apply


@pytest.mark.parametrize("form", FORMS)
def test_logits_that_are_returned_and_columns_that_are_padded(form):
    tensors = data(columns=37)
    double = [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in tensors]
    before = capture_joint(RETURNED["after the loss"], *tensors, decompositions=FORMS[form])
    for program, chunks in ((before, ChunkLoss(3, multiple=8)), (padded(before, 8), ChunkLoss(3))):
        result = apply(chunks, program)
        assert len(result.changes) == 1, reasons(result)
        assert len(products_of(result.program)) == len(products_of(before)) + 4
        assert_as_exact(result, program, tensors, capture_joint(RETURNED["after the loss"], *double))


def padded(program, multiple):
    """The program with the sizes of its matrix products padded to multiples, as Inductor pads them on a GPU."""
    new = program.copy()
    graph, aten = new.graph, torch.ops.aten
    for node in list(graph.nodes):
        if node.target not in (aten.mm.default, aten.addmm.default):
            continue
        *bias, left, right = node.args
        (m, k), n = left.meta["val"].shape, right.meta["val"].shape[1]
        m_pad, k_pad, n_pad = (-size % multiple for size in (m, k, n))
        with graph.inserting_before(node):
            pads = ((left, [0, k_pad, 0, m_pad]), (right, [0, n_pad, 0, k_pad]), *((b, [0, n_pad]) for b in bias))
            left, right, *bias = (
                graph.call_function(aten.constant_pad_nd.default, (operand, sizes)) if any(sizes) else operand
                for operand, sizes in pads
            )
            made = graph.call_function(node.target, (*bias, left, right))
            if m_pad:
                made = graph.call_function(aten.slice.Tensor, (made, 0, 0, -m_pad))
            if n_pad:
                made = graph.call_function(aten.slice.Tensor, (made, 1, 0, -n_pad))
        node.replace_all_uses_with(made)
        graph.erase_node(node)
    return new.finish()


@pytest.mark.quick("*-decomposed", "mean-fused")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["mean", "upcast", "smoothing", "capped", "separate_bias", "z_loss"])
def test_products_with_padded_columns(name, form):
    tensors = data(columns=37)
    exact = capture_joint(
        LOSSES[name], *(t.detach().double().requires_grad_() if t.is_floating_point() else t for t in tensors)
    )
    before = padded(capture_joint(LOSSES[name], *tensors, decompositions=FORMS[form]), 8)
    result = apply(ChunkLoss(3), before)
    assert len(result.changes) == 1, reasons(result)
    assert largest(before) >= ROWS * 40 * 4
    assert largest(result.program) < ROWS * 37 * 4
    assert_as_exact(result, before, tensors, exact)


@pytest.mark.quick(
    "True-mean-decomposed",
    "True-upcast-decomposed",
    "True-smoothing-decomposed",
    "True-separate_bias-decomposed",
    "True-z_loss-decomposed",
    "False-mean-fused",
    "False-class_weights-fused",
    "False-capped-fused",
)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("turned", [True, False])
def test_columns_are_padded_to_aligned_rows(name, form, turned):
    x, weight, bias, labels = data(columns=37)
    tensors = (x, weight if turned else weight.detach().t().contiguous().requires_grad_(), bias, labels)

    def loss(x, weight, bias, labels):
        return LOSSES[name](x, weight if turned else weight.t(), bias, labels)

    double = [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in tensors]
    before = capture_joint(loss, *tensors, decompositions=FORMS[form])
    result = apply(ChunkLoss(3, multiple=8), before)
    assert len(result.changes) == 1, reasons(result)
    assert_as_exact(result, before, tensors, capture_joint(loss, *double))
    for node in products_of(result.program) if turned else ():  # each row, or column, begins at a multiple of eight
        for value in [n.meta["val"] for n in (*node.args, node) if n.meta["val"].ndim == 2]:
            assert sorted(value.stride())[0] == 1 and sorted(value.stride())[1] % 8 == 0, node
    pads = [n for n in result.program.calls if n.target is torch.ops.aten.constant_pad_nd.default]
    assert not turned or sum(n.meta["val"].shape == (40, WIDTH) for n in pads) == 1  # the weight's, for all products
