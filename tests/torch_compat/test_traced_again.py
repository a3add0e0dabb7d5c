"""A model that refused a batch is planned for later ones, and so are others of its class."""

import pytest
import torch
from torch import nn

import memopt

GOOD, BAD = [torch.ones(size, 8) for size in (4, 6, 5)], torch.ones(4, 7)


class Checked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        if x.shape[1] != 8:
            raise ValueError(f"a width of {x.shape[1]}")
        return self.layer(x).relu()


class Inside(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Checked()

    def forward(self, x):
        return self.part(x).tanh()


class Late(nn.Module):
    """It raises behind a graph break."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.layer(x[:, :8] if x.shape[1] > 7 else nn.functional.pad(x, (0, 1)))
        torch._dynamo.graph_break()
        if x.shape[0] == 3:
            raise KeyError("late")
        return self.last(x)


MODELS = {
    "checked": (Checked, BAD, ValueError),
    "a part": (Inside, BAD, ValueError),
    "an operator": (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU()), BAD, RuntimeError),
    "behind a break": (Late, torch.ones(3, 8), KeyError),
    "an argument": (Checked, None, Exception),
}


@pytest.mark.quick(
    "checked-*", "a part-later-10MB", "an operator-later-None", "behind a break-later-10MB", "an argument-later-None"
)
@pytest.mark.parametrize("budget", [None, "10MB"])
@pytest.mark.parametrize("first", [True, False], ids=["at first", "later"])
@pytest.mark.parametrize(("make", "bad", "error"), MODELS.values(), ids=MODELS.keys())
def test_a_refused_batch_is_none_for_good(make, bad, error, first, budget):
    torch._dynamo.reset()
    run, graphs = memopt.compile(make(), budget, backend="aten"), 0
    parts = 2 if make is Late else 1
    for number, x in enumerate(GOOD):
        if number == (0 if first else 1):
            with pytest.raises(error):
                run(bad)
            graphs = run._memopt.sessions.graphs
        run(x).sum().backward()
        if number >= 1:
            assert run._memopt.sessions.graphs > graphs, run.report.notes
        graphs = run._memopt.sessions.graphs
    other = memopt.compile(make(), budget, backend="aten")
    other(GOOD[0]).sum().backward()
    assert other._memopt.sessions.graphs >= parts and not any("runs eagerly" in note for note in other.report.notes)


def test_what_dynamo_is_told_to_leave_alone_stays_so():
    calls = []

    class Left(Checked):
        @torch.compiler.disable
        def aside(self, x):
            calls.append(torch.compiler.is_compiling())
            if x.shape[1] != 8:
                raise ValueError("aside")
            return x

        def forward(self, x):
            return self.layer(self.aside(x)).relu()

    torch._dynamo.reset()
    run = memopt.compile(Left(), backend="aten")
    for x in (GOOD[0], BAD, GOOD[1], BAD, GOOD[2]):
        if x is BAD:
            with pytest.raises(ValueError, match="aside"):
                run(x)
        else:
            run(x).sum().backward()
    assert calls and not any(calls) and run._memopt.sessions.graphs
