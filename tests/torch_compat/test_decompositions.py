from __future__ import annotations

import torch

from memopt.torch_compat.decompositions import decomposition_of, is_written_out
from memopt.torch_compat.exporting import composites

aten = torch.ops.aten


def test_what_is_written_out_computes_the_same() -> None:
    x = torch.linspace(-2, 2, 7)
    assert is_written_out(aten.mish.default)
    torch.testing.assert_close(decomposition_of(aten.mish.default)(x), aten.mish.default(x))


def test_what_is_not_written_out() -> None:
    assert not is_written_out(aten.mm.default)


def test_composites_are_those_without_a_kernel_of_their_own() -> None:
    found = composites()
    assert aten.linear.default in found or aten.matmul.default in found
    assert aten.mm.default not in found
