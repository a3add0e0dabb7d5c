"""What a training program computes row by row from one product on."""

import pytest
import torch
import torch.nn.functional as F

from memopt.patterns.rows import RowRefused, find_rows, lead_of, products_before_losses
from memopt.program import Phase
from tests.passes.build import capture_joint
from tests.passes.test_chunk_loss import data

aten = torch.ops.aten


def loss(x, w, t):
    return F.cross_entropy(F.linear(x, w), t)


def captured(function=loss):
    x, weight, _, labels = data()
    return capture_joint(function, x, weight, labels), x, weight


def test_the_product_before_a_loss_over_classes_is_found_and_no_other():
    program, x, weight = captured()
    (product,) = products_before_losses(program)
    assert product.target is aten.mm.default and tuple(product.meta["val"].shape) == (len(x), len(weight))
    program, _, _ = captured(lambda x, w, t: F.linear(x, w).square().mean() + 0.0 * t.sum())
    assert products_before_losses(program) == []


def test_what_is_as_wide_exists_in_chunks_and_gradients_are_added_up():
    program, x, weight = captured()
    (product,) = products_before_losses(program)
    region = find_rows(program, product)
    assert region.rows == len(x) and region.product is product
    wide = {node for node in region.wide if tuple(node.meta["val"].shape) == (len(x), len(weight))}
    assert product in wide and {node.meta["phase"] for node in wide} == {Phase.FORWARD, Phase.BACKWARD}
    summed = {node for node, recipe in region.recipes.items() if recipe.summed}
    assert {tuple(node.meta["val"].shape) for node in summed if node.target is aten.mm.default} <= {
        tuple(weight.shape),
        tuple(weight.t().shape),
    }
    assert summed


def test_what_mixes_rows_is_refused_at_its_place():
    program, _, _ = captured(lambda x, w, t: F.cross_entropy(F.linear(x, w).cumsum(0), t))
    (product,) = products_before_losses(program)
    with pytest.raises(RowRefused) as found:
        find_rows(program, product)
    assert "cumsum" in str(found.value.node.target) or found.value.node.all_input_nodes


@pytest.mark.parametrize(
    ("shape", "rows", "lead"), [((2, 3, 8), 6, 2), ((6, 8), 6, 1), ((2, 3, 8), 4, None), ((), 1, None)]
)
def test_leading_dimensions_that_run_over_the_rows(shape, rows, lead):
    assert lead_of(shape, rows) == lead
