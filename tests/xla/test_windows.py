"""A batch that is run in equal parts: the same results as at once."""

import pytest

jax = pytest.importorskip("jax")

from memopt.xla.windows import cut, joined, many, parts_of  # noqa: E402


def test_one_number_stands_for_each_axis():
    assert many([3], 2) == (3, 3) and many([1, 2], 2) == (1, 2)


@pytest.mark.parametrize(("size", "most", "parts"), [(8, 4, 4), (6, 4, 3), (7, 4, 1), (1, 4, 1), (4, 4, 2), (8, 0, 1)])
def test_parts_are_equal_and_of_two_images_or_more(size, most, parts):
    assert parts_of(jax.numpy.zeros((size, 2)), most) == parts


def test_parts_are_put_together_again():
    x = jax.numpy.arange(24.0).reshape(6, 4)
    assert cut(x, 3).shape == (3, 2, 4) and (joined(cut(x, 3)) == x).all()
