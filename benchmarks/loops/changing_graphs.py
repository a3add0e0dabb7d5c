"""Loops whose steps run other graphs: edges as there are, layers left out or added, outputs asked for at times."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from benchmarks.loops.user import BATCH, CLASSES, STEPS, WIDTH, Net, User, adamw, loop, stepped


class Messages(nn.Module):
    """Nodes that hear from their neighbours, three times."""

    def __init__(self) -> None:
        super().__init__()
        self.says = nn.ModuleList(nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        for layer in self.says:
            said = layer(torch.cat([x[edges[0]], x[edges[1]]], -1))
            x = x + torch.zeros_like(x).index_add(0, edges[1], said)
        found: torch.Tensor = self.head(x)
        return found


@loop
def messages_on_edges(user: User) -> Iterator[None]:
    """A graph of as many edges as it happens to have."""
    model = Messages()
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        x, y = user.data(number, BATCH // 2)
        many = (1800, 1400, 1700, 1280)[number % 4]
        edges = torch.randint(0, len(x), (2, many), generator=torch.Generator().manual_seed(number))
        stepped(user, stepper, F.cross_entropy(call(x, edges), y))
        yield


class Skips(nn.Module):
    """Layers that are left out at random, as each step draws them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Net(classes=WIDTH) for _ in range(3))
        self.head, self.draws = nn.Linear(WIDTH, CLASSES), random.Random(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if not self.training or self.draws.random() < 0.7:
                x = x + layer(x)
        found: torch.Tensor = self.head(x)
        return found


@loop
def layers_left_out(user: User) -> Iterator[None]:
    model = Skips()
    stepper, call = user.with_adamw(model)
    for x, y in user.batches():
        stepped(user, stepper, F.cross_entropy(call(x), y))
        yield


@dataclasses.dataclass
class Output:
    """What a model returns by names, as those of libraries do."""

    loss: torch.Tensor
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...] = ()


class Hidden(nn.Module):
    """Returns what its parts make, too, where that is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.head = nn.ModuleList(Net(classes=WIDTH) for _ in range(3)), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor, hidden: bool = False) -> Output:
        made = []
        for part in self.parts:
            x = part(x)
            made.append(x)
        logits = self.head(x)
        return Output(F.cross_entropy(logits, y), logits, tuple(made) if hidden else ())


@loop
def hidden_now_and_then(user: User) -> Iterator[None]:
    """In each fourth step the loss is of what the parts make, too; outputs live until the next call has returned."""
    model = Hidden()
    stepper, call = user.with_adamw(model)
    for number, (x, y) in enumerate(user.batches()):
        found = call(x, y, hidden=number % 4 == 3)
        stepped(user, stepper, found.loss + sum(each.square().mean() for each in found.hidden))
        yield


@loop
def layers_added(user: User) -> Iterator[None]:
    """A layer that begins as nothing comes to the model in its sixth step, and to its optimizer."""
    model = Net()
    stepper, call = user.with_adamw(model)
    for number, (x, y) in enumerate(user.batches()):
        if number == STEPS // 2:
            added = nn.Linear(WIDTH, WIDTH)
            nn.init.zeros_(added.weight)
            model.body.append(added)
            stepper.add_param_group({"params": list(added.parameters())})
        stepped(user, stepper, F.cross_entropy(call(x), y))
        yield


@loop
def gradients_of_some(user: User) -> Iterator[None]:
    """Backward of two losses together, in each second step for the head's parameters alone."""
    model = Net()
    stepper, call = user.with_adamw(model)
    for number, (x, y) in enumerate(user.batches()):
        found = call(x)
        loss = F.cross_entropy(found, y)
        stepper.zero_grad()
        some = model.heads if number % 2 else model
        torch.autograd.backward([loss, found.square().mean()], inputs=list(some.parameters()))
        stepper.step()
        user.note(loss)
        yield


@loop
def critic_of_one_budget(user: User) -> Iterator[None]:
    """A GAN whose models share the budget: its critic is called for its own loss twice, then for the generator's."""
    make = Net(classes=WIDTH)
    judge = nn.Sequential(
        *[layer for _ in range(4) for layer in (parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.GELU())],
        nn.Linear(WIDTH, 1),
    )
    makes, judges = adamw(make), adamw(judge)
    made_by, judged_by = user.compile([make, judge], [makes, judges])
    for number, (x, _) in enumerate(user.batches()):
        made = made_by(user.data(100 + number)[0])
        stepped(user, judges, (1 - judged_by(x)).relu().mean() + (1 + judged_by(made.detach())).relu().mean())
        stepped(user, makes, -judged_by(made).mean())
        yield
