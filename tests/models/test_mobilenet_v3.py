"""The blocks of MobileNetV3 that its table asks for."""

import torch
from torch import nn

from memopt import models
from memopt.models.mobilenet_v3 import LARGE, LARGE_TINY, SMALL, SMALL_TINY, SqueezeExcite


def test_tiny_tables_have_every_combination_of_gate_and_activation():
    for rows, tiny in ((LARGE, LARGE_TINY), (SMALL, SMALL_TINY)):
        kinds = {(row.squeeze, row.hardswish) for row in rows}
        assert {(row.squeeze, row.hardswish) for row in tiny} == kinds
        assert {row.kernel for row in tiny} == {3, 5}
        assert {row.stride for row in tiny} == {1, 2}


def test_first_block_has_no_expansion_and_the_last_map_is_7_by_7():
    with torch.device("meta"):
        model = models.build("mobilenet_v3_large")
        assert len(model.features[1].block) == 2
        assert model.features(model.example_inputs(1)["images"]).shape == (1, 960, 7, 7)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert {(norm.eps, norm.momentum) for norm in norms} == {(1e-3, 0.01)}


def test_squeeze_and_excite_scales_whole_channels():
    gate, x = SqueezeExcite(16), torch.randn(2, 16, 4, 4)
    ratio = gate(x) / x
    torch.testing.assert_close(ratio, ratio[:, :, :1, :1].expand_as(ratio))
    assert gate.reduce.out_channels == 8
