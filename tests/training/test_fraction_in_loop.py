"""A fraction is of what eager itself takes in the same loop, once its first steps were seen: to the byte."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memopt

ROWS, FRACTION = 256, 0.75
STEPS = 5  # more than those that a fraction goes by


class Net(nn.Module):
    def __init__(self, heads=1):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.heads = nn.ModuleList(nn.Linear(32, 64) for _ in range(heads))

    def forward(self, x):
        for layer in self.layers:
            x = x + F.gelu(layer(x)).tanh()
        found = [head(x) for head in self.heads]
        return found[0] if len(found) == 1 else tuple(found)


class WithItsLoss(nn.Module):
    """As models of transformers: the loss, and the logits that it is of."""

    def __init__(self):
        super().__init__()
        self.net, self.head = Net(), nn.Linear(64, 256)

    def forward(self, x, y):
        logits = self.head(self.net(x))
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


def mean(call, model, optimizer, x, y):
    """Its loss takes nothing, and `zero_grad` comes behind it."""
    loss = call(x).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def lets_go(call, model, optimizer, x, y):
    """Nothing of the outputs is left as backward begins."""
    loss = F.cross_entropy(call(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def accumulates(call, model, optimizer, x, y):
    optimizer.zero_grad()
    for rows in x.chunk(2), x.chunk(2)[::-1]:
        loss = F.cross_entropy(call(rows[0]), y[: len(rows[0])])
        loss.backward()
    optimizer.step()
    return loss


def tasks(call, model, optimizer, x, y):
    """Of two outputs each backward is of one."""
    optimizer.zero_grad()
    for task in range(2):
        loss = F.cross_entropy(call(x)[task], y)
        loss.backward()
    optimizer.step()
    return loss


def pair(call, model, optimizer, x, y):
    """Two calls, whose outputs are gone before backward."""
    optimizer.zero_grad()
    loss = F.pairwise_distance(call(x), call(x.flip(0))).mean()
    loss.backward()
    optimizer.step()
    return loss


def holds(call, model, optimizer, x, y):
    """The outputs are there all through backward, which begins with the loss alone."""
    optimizer.zero_grad()
    out = call(x, y)
    out["loss"].backward()
    optimizer.step()
    return out["logits"].detach().mean()


def accumulates_its_loss(call, model, optimizer, x, y):
    """As `holds`, twice: the second backward adds to gradients, and is of a graph of its own."""
    optimizer.zero_grad()
    for rows in slice(0, ROWS // 2), slice(ROWS // 2, ROWS):
        out = call(x[rows], y[rows])
        out["loss"].backward()
    optimizer.step()
    return out["logits"].detach().mean()


def computed(call, model, optimizer, x, y, return_outputs=False):
    """As the Trainer does: who takes what is not to be proven, and the outputs are gone as backward begins."""

    def compute_loss():
        out = call(x, y)
        return (out["loss"], out) if return_outputs else out["loss"]

    optimizer.zero_grad()
    loss = compute_loss()
    loss.backward()
    optimizer.step()
    return loss


def takes_both(call, model, optimizer, x, y):
    optimizer.zero_grad()
    out = call(x, y)
    loss = out["loss"] + out["logits"].square().mean()
    loss.backward()
    optimizer.step()
    return loss


_OWN_LOSS = (holds, accumulates_its_loss, computed, takes_both)


def trained(step, fraction):
    """The peak of the last of some steps, with all that is there before it; the budget; all losses and weights."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = WithItsLoss() if step in _OWN_LOSS else Net(2 if step is tasks else 1)
    x = torch.randn(ROWS, 32)
    y = torch.randint(0, 64, (ROWS,))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    call = model if fraction is None else memopt.compile(model, fraction, optimizer=optimizer, backend="aten")
    numbers = [step(call, model, optimizer, x, y).item() for _ in range(STEPS)]
    states = (value for state in optimizer.state.values() for value in state.values())
    inputs = [x, y] if step in _OWN_LOSS else [x]
    held = sum(each.nbytes for each in (*model.parameters(), *inputs, *states) if isinstance(each, torch.Tensor))
    optimizer.zero_grad()  # else their release would not be seen
    found = memopt.measure(lambda: numbers.append(step(call, model, optimizer, x, y).item()))
    budget = None if fraction is None else call.report.budget_bytes
    return held + found.peak_bytes, budget, [*numbers, *(each.detach().clone() for each in model.parameters())]


@pytest.mark.quick("lets_go", "accumulates", "accumulates_its_loss", "computed")
@pytest.mark.parametrize("step", [mean, lets_go, accumulates, tasks, pair, *_OWN_LOSS], ids=lambda step: step.__name__)
def test_a_fraction_is_never_of_more_than_eager_takes_in_its_loop(step):
    eager, _, expected = trained(step, None)
    taken, budget, numbers = trained(step, FRACTION)
    close = {} if step in _OWN_LOSS else {"rtol": 0, "atol": 0}  # a plan may split a loss that is the model's own
    for found, other in zip(numbers, expected, strict=True):
        torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(other), **close)
    assert taken <= budget == int(FRACTION * eager)


def test_small_convolutions_are_split_where_nothing_else_keeps_a_fraction():
    """What the first trained convolution needs in backward is most of the step, which recomputing does not lower."""
    body = nn.Sequential(*(part for _ in range(3) for part in (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())))
    body.requires_grad_(False)
    head = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten())
    model = nn.Sequential(body, head, nn.Linear(8 * 36, 16))
    x, y = torch.randn(64, 8, 8, 8), torch.randint(0, 16, (64,))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for call in (model, memopt.compile(model, 0.8, optimizer=optimizer, backend="aten")):
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(call(x), y)
            loss.backward()
            losses.append((loss.item(), *(each.grad.clone() for each in head.parameters())))
    assert "split_batch" in [record.name for record in call.report.passes if record.changes]
    for found, expected in zip(losses[3:], losses[:3], strict=True):
        torch.testing.assert_close(found, expected)
