"""Recipes beside their operators in float64: into slices of other memory, and in tiles of one row."""

import math

import pytest
import torch
import torch.nn.functional as F

from memopt.static import recipes as recipes
from tests.support import allocations

aten = torch.ops.aten


def randn(*shape):
    return torch.randn(shape, dtype=torch.float64)


def number(value):
    return torch.tensor(float(value), dtype=torch.float64)


def inside(*shape):
    """Memory to write to in the middle of other memory, and what must not be written."""
    room = torch.full((shape[0] + 2, *shape[1:]), 7.0, dtype=torch.float64)
    return room[1:-1], room


def written(recipe, shape, expected):
    out, room = inside(*shape)
    out.fill_(math.nan)  # what was there before must not matter
    assert not [size for size in allocations(lambda: recipe(out)) if size > 0], "a recipe allocates nothing"
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10, equal_nan=True)
    assert (room[0] == 7).all() and (room[-1] == 7).all()


@pytest.mark.parametrize("affine", [False, True])
def test_layer_norm_with_its_statistics(affine):
    x, w, b = randn(3, 5, 8), *((randn(8), randn(8)) if affine else (None, None))
    result, mid, scale = inside(3, 5, 8)[0], randn(3, 5, 1), randn(3, 5, 1)
    recipes.layer_norm((result, mid, scale), x, 1, w, b, number(8), number(1e-5))
    for found, expected in zip((result, mid, scale), aten.native_layer_norm(x, [8], w, b, 1e-5), strict=True):
        torch.testing.assert_close(found, expected)


def test_group_norm_with_its_statistics():
    x, w, b = randn(2, 6, 3, 4), randn(6), randn(6)
    outs = randn(2, 6, 3, 4), randn(2, 3), randn(2, 3)
    recipes.group_norm(outs, x, w, b, 3, number(24), number(1e-5))
    for found, expected in zip(outs, aten.native_group_norm(x, w, b, 2, 6, 12, 3, 1e-5), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("affine", [(False, False), (True, False), (True, True)])
def test_batch_norm_by_running_statistics(affine):
    x, mid, var = randn(2, 6, 3, 4), randn(6), randn(6).abs()
    w, b = (randn(6) if there else None for there in affine)
    eps, scratch, expected = number(1e-3), randn(12), F.batch_norm(x, mid, var, w, b, eps=1e-3)
    written(lambda out: recipes.batch_norm(out, x, w, b, mid, var, eps, scratch), x.shape, expected)


def test_mean():
    x, count = randn(4, 5, 6), number(20)
    written(lambda out: recipes.mean(out, x, [0, 1], False, count), (6,), x.mean((0, 1)))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 99])
@pytest.mark.parametrize(
    ("channels", "groups", "stride", "padding", "dilation"),
    [(4, 1, (1, 1), (0, 0), (1, 1)), (4, 2, (2, 1), (2, 1), (1, 2)), (3, 1, (1, 3), (4, 0), (2, 1))],
)
def test_convolution_by_tiles_of_rows(channels, groups, stride, padding, dilation, rows, bias):
    x, w = randn(2, channels, 9, 8), randn(6, channels // groups, 3, 2)
    b = randn(6) if bias else None
    expected = F.conv2d(x, w, b, stride, padding, dilation, groups)
    sizes = w.shape, x.shape, stride, padding, dilation, *expected.shape[2:]
    elements = next(
        size for size in range(1, 10**5) if recipes.tile_rows(size, *sizes)[0] == min(rows, expected.shape[2])
    )
    counted, slab = recipes.tile_rows(elements, *sizes)
    scratch = randn(slab + counted * w[0].numel() * expected.shape[3])
    written(
        lambda out: recipes.convolution(out, x, w, b, stride, padding, dilation, groups, scratch),
        expected.shape,
        expected,
    )


def test_more_room_makes_larger_tiles_and_one_row_is_the_least():
    sizes = (6, 4, 3, 3), (2, 4, 9, 9), (1, 1), (1, 1), (1, 1), 9, 9
    rows = [recipes.tile_rows(elements, *sizes)[0] for elements in (0, 1000, 2000, 10**6)]
    assert rows == sorted(rows) and rows[0] == 1 and rows[-1] == 9 and len(set(rows)) > 2
    assert recipes.tile_rows(10**6, *sizes[:3], (0, 0), *sizes[4:])[1] == 0  # without padding nothing is put aside


def test_depthwise_convolution_whose_windows_leave_the_image():
    x, w = randn(2, 3, 4, 5), randn(6, 1, 3, 3)
    expected = F.conv2d(x, w, None, (2, 1), (3, 2), (1, 2), 3)
    run = lambda out: recipes.convolution(out, x, w, None, (2, 1), (3, 2), (1, 2), 3, None)  # noqa: E731
    written(run, expected.shape, expected)


@pytest.mark.parametrize("rows", [1, 5])
def test_transposed_convolution_by_tiles_of_rows(rows):
    x, w, b = randn(2, 6, 5, 4), randn(6, 2, 3, 4), randn(4)
    expected = F.conv_transpose2d(x, w, b, (1, 3), (2, 1), 0, 2, (2, 1))
    scratch = randn(3 * 2 + rows * 2 * 4)
    run = lambda out: recipes.transposed_convolution(out, x, w, b, (1, 3), (2, 1), (2, 1), 2, scratch)  # noqa: E731
    written(run, expected.shape, expected)


@pytest.mark.parametrize("tile", [1, 3, 7])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_by_tiles_of_queries(causal, tile):
    q, k, v, mask = randn(2, 3, 7, 4), randn(2, 3, 7, 4), randn(2, 3, 7, 5), randn(2, 1, 1, 7)
    scores = q @ k.mT * 0.3 + mask
    if causal:
        scores = scores.masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -math.inf)
    future = torch.ones(tile, tile, dtype=torch.bool).triu(1) if causal else None
    scratch = randn(3 * 7 * tile)
    expected = scores.softmax(-1) @ v
    written(lambda out: recipes.attention(out, q, k, v, mask, future, 0.3, scratch), expected.shape, expected)


@pytest.mark.parametrize("dim", [0, 1])
def test_softmax_is_zero_where_all_is_minus_infinity(dim):
    x = randn(3, 4)
    x.select(dim, 1).fill_(-math.inf)
    other = x.movedim(dim, -1)
    other[1] = -math.inf
    scratch, infinity = randn(8), number(-math.inf)
    written(lambda out: recipes.safe_softmax(out, x, dim, infinity, scratch), (3, 4), aten._safe_softmax(x, dim))
    assert (aten._safe_softmax(x, dim).movedim(dim, -1)[1] == 0).all()


def test_copies():
    x, index = randn(4, 3), torch.tensor([[3, 0], [1, 1]])
    written(lambda out: recipes.embedding(out, x, index), (2, 2, 3), F.embedding(index, x))
    written(lambda out: recipes.pad(out, x, [1, 2, 0, 3], 5.0), (7, 6), F.pad(x, (1, 2, 0, 3), value=5.0))
    written(lambda out: recipes.repeat(out, x, [2, 3, 2]), (2, 12, 6), x.repeat(2, 3, 2))
    expected = torch.slice_scatter(x, x[:2], 0, 1, 3)
    written(lambda out: recipes.scatter(out, x, x[:2], aten.slice.Tensor, 0, 1, 3), (4, 3), expected)
    written(lambda out: recipes.copy_then(out, x, aten.neg_.default), (4, 3), -x)


def test_pooling_into_a_slice_goes_image_by_image():
    x = randn(2, 3, 8, 8)
    expected, places = F.max_pool2d(x, 2, return_indices=True)
    room, indices = randn(2, 5, 4, 4), torch.zeros(2, 5, 4, 4, dtype=torch.int64)
    outs = room[:, 1:4], indices[:, 1:4]
    assert not outs[0].is_contiguous()
    recipes.pool(outs, aten.max_pool2d_with_indices.out, x, [2, 2])
    assert torch.equal(outs[0], expected) and torch.equal(outs[1], places) and (indices[:, 0] == 0).all()
