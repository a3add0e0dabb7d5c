import itertools

import pytest
import torch

import memopt
from memopt.graph import snapshot
from memopt.report import build
from tests.step.test_planned import planned, program


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


def test_the_curve_falls_in_bytes_and_meets_the_report(reports):
    for report in reports:
        assert len(report.curve) > 3
        for more, less in itertools.pairwise(report.curve):
            assert (more.bytes, -more.seconds) > (less.bytes, -less.seconds)
            assert more.seconds < less.seconds
            assert more.extra < less.extra
        assert [point.bytes for point in report.curve if point.chosen] == [report.peak_bytes]
        assert report.curve[-1].bytes == report.minimum_bytes


def test_a_budget_changes_the_choice_and_not_the_curve(reports):
    free, tight = reports
    assert free.curve[-1].bytes == tight.curve[-1].bytes
    (chosen,) = [point for point in tight.curve if point.chosen]
    assert chosen.bytes <= tight.budget_bytes
    assert chosen.extra > next(point for point in free.curve if point.chosen).extra


def test_below_the_optimizers_peak_there_is_nothing_to_be_gained():
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64)] * 2)
    report = memopt.plan(model, (torch.ones(2, 64),), None, optimizer=torch.optim.Adam(model.parameters()))
    assert [point.bytes for point in report.curve] == [report.peak_bytes]
    assert report.curve[0].chosen


def test_graphs_that_were_put_on_record_ahead_are_not_looked_at_again(monkeypatch):
    item = planned(program())
    build.put_on_record([item])
    monkeypatch.setattr(snapshot, "_taken", None)
    before, after = build._graphs(item)
    assert before is after and len(after.nodes) == len(item.program.graph.nodes)


def test_slack_that_is_left_to_an_allocator_makes_no_minimum_a_bound(monkeypatch):
    """The last plan of a curve takes less than the minimum that leaves slack beside it, and is that minimum's own."""
    monkeypatch.setattr("memopt.report.build.with_slack", lambda size, device: size + 2**20)
    run = memopt.compile(Chain(), "1GB", backend="aten")
    run(torch.randn(1024, 16)).backward()
    report = run.report
    assert report.curve and report.curve[-1].bytes < report.minimum_bytes and not report.minimum_is_a_bound
