"""ChunkLoss where classes come in tiles, as in TRL's fused heads: a tile reads what those before have come to."""

import pytest
import torch
import torch.nn.functional as F

from memopt.memory.timeline import timeline
from memopt.passes.chunk_loss import ChunkLoss
from tests.passes.build import capture_joint, reasons
from tests.passes.test_chunk_loss import COLUMNS, FORMS, assert_as_exact, data
from tests.support import apply


def by_tiles(tile):
    """The mean of -log p of the labels, with a maximum and a sum that run over tiles of the classes."""

    def loss(x, w, b, t):
        most = torch.full(t.shape, float("-inf"), dtype=x.dtype)
        total = picked = torch.zeros(t.shape, dtype=x.dtype)
        for start in range(0, COLUMNS, tile):
            part = F.linear(x, w[start : start + tile], b[start : start + tile])
            higher = torch.maximum(most, part.amax(-1).detach())
            total = total * (most - higher).exp() + (part - higher.unsqueeze(-1)).exp().sum(-1)
            most, own = higher, t - start
            here = part.gather(-1, own.clamp(0, part.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
            picked = torch.where((own >= 0) & (own < part.shape[-1]), here, picked)
        return (most + total.log() - picked).mean()

    return loss


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tile", [20, 10])
def test_each_tile_is_chunked_beside_float64(tile, form):
    tensors = data(ignored=False)
    exact = capture_joint(
        by_tiles(tile), *(t.detach().double().requires_grad_() if t.is_floating_point() else t for t in tensors)
    )
    before = capture_joint(by_tiles(tile), *tensors, decompositions=FORMS[form])
    result = apply(ChunkLoss(3), before)
    assert len(result.changes) == COLUMNS // tile and not result.refusals, reasons(result)
    assert_as_exact(result, before, tensors, exact)
    assert timeline(result.program).peak_bytes < timeline(before).peak_bytes
