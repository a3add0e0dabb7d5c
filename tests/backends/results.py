"""Results of many kinds, which every engine for inference has to return as eager does."""

from __future__ import annotations

import torch
from torch import nn

import memopt


class Several(nn.Module):
    """A view in another layout, integers, booleans, an input, a number and None."""

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, object]:
        y = x * scale
        return {"t": y.transpose(0, 1), "i": y.argmax(1), "b": y > 0, "x": x, "n": 3, "none": None, "y": [y, y]}


@torch.no_grad()
def check_results(backend: str) -> None:
    """Compare them, with their strides, for two layouts of the input."""
    model = Several().eval()
    compiled = memopt.compile(model, backend=backend)
    x, scale = torch.randn(3, 5), torch.randn(5)
    turned = x.t().contiguous().t()
    found, expected = compiled(turned, scale=scale), model(turned, scale=scale)
    assert found.keys() == expected.keys() and found["n"] == 3 and found["none"] is None
    for name in ("t", "i", "b", "x"):
        torch.testing.assert_close(found[name], expected[name])
    assert found["t"].stride() == expected["t"].stride() == (3, 1)
    assert compiled(x, scale=scale)["t"].stride() == (1, 5)
    torch.testing.assert_close(found["y"], expected["y"])
