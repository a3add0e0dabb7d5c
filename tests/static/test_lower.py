"""Which operators have a recipe for which operands, and what memory it asks for."""

import math

import pytest
import torch
import torch.nn.functional as F

from memopt.static import recipes as recipes
from memopt.static.lower import LEAST_TILE, TILE, has_recipe, lower
from memopt.static.write import Out, Place
from tests.passes.build import trace

aten = torch.ops.aten
X = torch.randn(2, 4, 6, 6)
W = torch.randn(8, 4, 3, 3)


def recipe_of(function, *tensors):
    """The recipe for the last operator of the function's graph."""
    return lower(trace(lambda *given: (function(*given),), *tensors).calls[-1])


def test_the_write_names_the_result_the_operands_and_the_defaults():
    write = recipe_of(lambda x: x.relu(), X)
    assert write.function is aten.clamp_min.out and write.kwargs == {"out": Out()}
    assert write.args[0].op == "placeholder" and write.args[1] == 0
    filled = recipe_of(lambda x: torch.full_like(x, 2.5), X)
    assert filled.function is aten.fill_.Scalar and filled.args == (Out(), 2.5)
    summed = recipe_of(lambda x: aten.rsub.Scalar(x, 3), X)
    assert summed.kwargs["alpha"] == 1 and summed.args[0].item() == 3.0


def test_operators_without_a_recipe():
    assert has_recipe(aten.relu.default) and not has_recipe(aten.exp.default) and not has_recipe("call")
    assert recipe_of(lambda x: x.exp(), X) is None


@pytest.mark.parametrize(
    ("function", "tensors"),
    [
        (lambda x: x.mean(0, dtype=torch.float64), (X,)),  # a cast would be into fresh memory
        (F.conv2d, (X[:0], W)),  # nothing to compute
        (lambda x, w: F.conv2d(x, w.mT), (X, W)),  # a weight that is not dense
        (F.conv3d, (X[None], torch.ones(1, 2, 1, 1, 1))),
        (lambda x: F.pad(x, (-1, 1)), (X,)),
        (lambda x: aten.native_layer_norm(x, [6], None, None, 1e-5), (X[:0],)),
        (lambda x: aten.native_group_norm(x.mT, None, None, 2, 4, 36, 2, 1e-5), (X,)),
        (lambda x, mask: x.masked_fill(mask, 1.0), (X[0], torch.ones(2, 4, 6, 6, dtype=torch.bool))),
        (lambda x: aten.avg_pool2d(x, 2), (X[0],)),
        (lambda x, index: F.embedding(index.t(), x), (X[0, 0], torch.tensor([[0, 1], [1, 0]]))),
    ],
)
def test_operands_that_a_recipe_does_not_cover_are_left_to_the_operator(function, tensors):
    program = trace(lambda *given: tuple(torch.utils._pytree.tree_leaves(function(*given))), *tensors)
    node = next(node for node in reversed(program.calls) if has_recipe(node.target))
    assert lower(node) is None


def test_a_convolution_s_scratch_is_a_tile_between_its_bounds():
    x, w = torch.randn(1, 16, 64, 64), torch.randn(16, 16, 3, 3)
    form = recipe_of(lambda x, w: F.conv2d(x, w, padding=1), x, w).form
    everything = 16 * 9 * 64 * 64 * 4
    assert form.slices and 0 < form.scratch <= LEAST_TILE * 1.1 < form.wish <= TILE * 1.1 < everything


def test_what_reads_its_columns_from_the_input_asks_for_no_scratch():
    one = recipe_of(lambda x: F.conv2d(x, torch.ones(8, 4, 1, 1)), X)
    each = recipe_of(lambda x: F.conv2d(x, torch.ones(4, 1, 3, 3), groups=4), X)
    assert one.function is each.function is recipes.convolution
    assert one.form.scratch == each.form.scratch == 0


def test_a_row_of_scores_is_the_least_that_attention_asks_for():
    q = torch.randn(1, 2, 64, 8)
    program = trace(lambda q: (aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)[0],), q)
    write = lower(program.calls[0])
    row = 2 * 64 * 4
    assert write.form.scratch == row * 64 and not write.form.slices
    assert write.args[-1] is Place.SCRATCH and math.isclose(write.args[6], 8**-0.5)


def test_long_attention_asks_for_what_stays_in_a_cache():
    q = torch.randn(1, 2, 600, 8)
    program = trace(lambda q: (aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)[0],), q)
    form, row = lower(program.calls[0]).form, 2 * 600 * 4
    assert (form.scratch // row, form.wish // row) == (LEAST_TILE // row, TILE // row) == (27, 109)


def test_attention_that_drops_or_whose_sums_are_read_is_left_to_its_operator():
    q, op = torch.randn(1, 2, 20, 8), aten._scaled_dot_product_flash_attention_for_cpu
    assert lower(trace(lambda q: (op(q, q, q, 0.5)[0],), q).calls[0]) is None
    assert lower(trace(lambda q: (op(q, q, q)[0], op(q, q, q)[1] * 2), q).calls[0]) is not None
    assert lower(trace(lambda q: (*(r * 2 for r in op(q, q, q)),), q).calls[0]) is None
