"""A first call while somebody measures memory: planned by estimates, or refused in a line where bytes must be known."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import memopt


@pytest.mark.parametrize("budget", [None, "1MB"])
def test_it_is_planned_by_estimates_or_refused(
    budget: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    model, x = nn.Linear(7, 9), torch.randn(3, 7)
    expected, compiled = model(x), memopt.compile(model, budget, backend="aten")
    if budget is None:
        assert torch.equal(memopt.measure(compiled, x).value, expected)
    else:
        line = "^memory cannot be measured while a profiler is active: leave it first$"
        with pytest.raises(RuntimeError, match=line):
            memopt.measure(compiled, x)
    assert torch.equal(compiled(x), expected) and compiled.report.peak_bytes
    assert not (tmp_path / "failures").exists()
