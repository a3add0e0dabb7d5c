import pytest
import torch

import memopt


class Chain(torch.nn.Module):
    """Activations of 64 kB each: a plan for less memory must compute some of them again."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU())] * 6)

    def forward(self, x):
        return self.layers(x).square().mean()


@pytest.fixture(scope="module")
def reports():
    inputs = (torch.ones(1024, 16),)
    free = memopt.plan(Chain(), inputs, None)
    return free, memopt.plan(Chain(), inputs, int(free.unconstrained_bytes * 0.75))


def test_peak_total_and_timeline_agree(reports):
    for report in reports:
        (program,) = report.programs
        assert max(program.timeline_after) == report.peak_bytes == report.breakdown.total
        assert max(program.timeline_before) == report.unconstrained_bytes


def test_breakdown_adds_up(reports):
    for report in reports:
        *parts, (_, total) = report.breakdown.headings()
        assert sum(size for _, size in parts) == total


def test_saved_rows_are_storages_counted_once(reports):
    """Views and the two names of one storage must not swell the sum: it fits below the peak."""
    for report in reports:
        (program,) = report.programs
        names = [row.name for row in program.saved]
        assert len(names) == len(set(names))
        assert 0 < sum(row.bytes for row in program.saved) <= report.peak_bytes
        assert [row.bytes for row in program.saved] == sorted((row.bytes for row in program.saved), reverse=True)


def test_less_is_kept_and_more_computed_again_under_a_budget(reports):
    free, tight = (report.programs[0] for report in reports)
    assert sum(row.bytes for row in tight.saved) < sum(row.bytes for row in free.saved)
    assert len(tight.recomputed) > len(free.recomputed)
    assert all("test_build.py" in row.source for row in tight.recomputed)
