"""Calls without gradients at many sizes, by one compilation of Inductor's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memopt
from tests.inductor.test_peak_lower_bound import needs_compiler
from tests.training.steps import peak_of

pytestmark = [needs_compiler, pytest.mark.usefixtures("own_caches")]


class Attention(nn.Module):
    """Keys grow by what it is called with, and a buffer counts the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.drop = nn.Linear(16, 16), nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x, past=None):
        self.count.add_(1)
        keys = self.keys(x) if past is None else torch.cat([past, self.keys(x)], 1)
        return self.drop((x @ keys.mT).softmax(-1) @ keys), keys


def test_it_is_counted_before_it_runs_and_is_what_eager_returns():
    torch.manual_seed(0)
    model = Attention()  # dropout draws as eager's does
    run = memopt.compile(model, "1MB", backend="inductor")
    with torch.no_grad():
        for length in (20, 8, 40, 30, 70):
            x = torch.randn(2, length, 16)
            torch.manual_seed(1)
            wanted = model(x)
            torch.manual_seed(1)
            torch.testing.assert_close(run(x), wanted)
        peak = peak_of(lambda: run(x), model, x)
        # What grows with the square of a size is counted for 2.25 times as much.
        assert run._memopt.sessions.graphs == 2 and peak <= run.report.peak_bytes <= 2.3 * peak
    assert model.count == 11


def test_where_there_is_no_room_a_size_is_planned_by_itself():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4)).eval()
    weights = sum(4 * parameter.numel() for parameter in model.parameters())
    run = memopt.compile(model, weights + 150_000, backend="inductor")
    with torch.no_grad():
        for rows in (40, 50, 120, 60):  # of 120 all but what is computed in parts is too much
            x = torch.randn(rows, 16)
            torch.testing.assert_close(run(x), model(x))
            assert peak_of(lambda x=x: run(x), model, x) <= weights + 150_000
    assert run._memopt.sessions.graphs == 3
    assert any("x.size()[0] = 120" in note or "= 120" in note for note in run.report.notes)


def test_what_torch_has_kept_of_the_graph_does_not_hide_its_code(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)).eval()
    for process in ("first", "second"):
        monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path / process))
        torch._dynamo.reset()
        run = memopt.compile(model, "10MB", backend="inductor")
        with torch.no_grad():
            for rows in (40, 20, 30):
                run(torch.randn(rows, 16))
        assert run._memopt.sessions.graphs == 2 and not any("by itself" in note for note in run.report.notes)
