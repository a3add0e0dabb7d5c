import itertools

import torch

import memopt
from memopt.planner import GraphPeaks, step_peak


class Broken(torch.nn.Module):
    """Two graphs in one step."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU())] * 3)
        self.second = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU())] * 3)

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x).square().mean()


def test_several_graphs_have_one_curve():
    torch._dynamo.reset()
    free = memopt.plan(Broken(), (torch.ones(512, 16),), None)
    assert len(free.programs) == 2
    tight = memopt.plan(Broken(), (torch.ones(512, 16),), int(free.unconstrained_bytes * 0.8))
    for report in (free, tight):
        assert len(report.curve) > 3
        for more, less in itertools.pairwise(report.curve):
            assert more.bytes > less.bytes
            assert more.seconds < less.seconds
        assert [point.bytes for point in report.curve if point.chosen] == [report.peak_bytes]
        assert report.curve[-1].bytes == report.minimum_bytes


def test_the_peak_of_a_step_counts_what_other_graphs_hold():
    first, second = GraphPeaks(10, 20, 5, 3), GraphPeaks(7, 9, 2, 1)
    assert step_peak([first]) == 20
    assert step_peak([second, first]) == max(7, 9 + 3, 2 + 10, 2 + 20)
