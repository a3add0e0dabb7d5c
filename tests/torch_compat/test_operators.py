from __future__ import annotations

import operator

import pytest
import torch

from memopt.torch_compat import operators

aten = torch.ops.aten


def test_what_an_operator_is_called_and_takes() -> None:
    assert operators.schema_of(aten.add.Tensor).name == "aten::add"
    assert operators.schema_of(aten.add_.Tensor).is_mutable and not operators.schema_of(aten.add.Tensor).is_mutable
    assert (operators.operator_name(aten.add.Tensor), operators.overload_name(aten.add.Tensor)) == ("add", "Tensor")
    assert operators.operator_name(operator.getitem) == ""
    assert isinstance(aten.add.Tensor, operators.OpOverload)
    assert isinstance(torch.ops.higher_order.cond, operators.HigherOrderOperator)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")
def test_the_library_of_a_convolution_follows_the_settings() -> None:
    values = torch.randn(4, 32, 16, 16), torch.randn(32, 32, 3, 3), None
    asked = [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    assert operators.convolution_library(values, *asked) == "Mkldnn"
    torch._C._set_mkldnn_enabled(False)  # the public context manager warns of GPUs
    try:
        assert operators.convolution_library(values, *asked) != "Mkldnn"
    finally:
        torch._C._set_mkldnn_enabled(True)


def test_attention_is_the_function_of_the_graphs() -> None:
    assert operators.attention_function() is torch.nn.functional.scaled_dot_product_attention
    assert isinstance(operators.nnpack_enabled(), bool)
