"""More loops in which features meet: parts that run eagerly, models in a row, calls before the one that counts."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.loops.pairs import Output, WithLoss, by_its_loss
from benchmarks.loops.user import BATCH, CLASSES, STEPS, WIDTH, Net, User, adamw, entropy, loop, stepped


class Aside(WithLoss):
    """A layer that torch.compile leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.aside = nn.Linear(WIDTH, WIDTH)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _aside(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.aside(x))

    def _block(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return super()._block(layer, self._aside(x) if layer is self.body[4] else x)


@loop
def eager_part_and_loss_alone(user: User) -> Iterator[None]:
    model = Aside()
    stepper, call = user.with_adamw(model)
    for x, y in user.batches():
        by_its_loss(user, call, stepper, x, y)
        yield


@loop
def averaged_by_schedule(user: User) -> Iterator[None]:
    """Stochastic weight averaging in the second half, with its rates."""
    model = WithLoss()
    stepper = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    average = torch.optim.swa_utils.AveragedModel(model)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(stepper, STEPS)
    slow = torch.optim.swa_utils.SWALR(stepper, 0.01)
    user.models.append(average)
    call = user.compile(model, stepper)
    for number in range(STEPS):
        x, y = user.data(number)
        by_its_loss(user, call, stepper, x, y)
        if number >= STEPS // 2:
            average.update_parameters(model)
            slow.step()
        else:
            cosine.step()
        yield


@loop
def encoder_trained_in_turn(user: User) -> Iterator[None]:
    """Two models in a row under one budget; in every second step the head alone is trained."""
    encoder, head = Net(classes=WIDTH), WithLoss()
    one, two = adamw(encoder), adamw(head)
    encode, call = user.compile([encoder, head], [one, two])
    for number in range(STEPS):
        x, y = user.data(number)
        found = encode(x)
        loss = call(found.detach() if number % 2 else found, y).loss
        one.zero_grad()
        two.zero_grad()
        loss.backward()
        if number % 2 == 0:
            one.step()
        two.step()
        user.note(loss)
        yield


@loop
def hard_examples(user: User) -> Iterator[None]:
    """A batch twice as large is looked at without gradients; the half that is hardest is trained."""
    model = Net()
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        x, y = user.data(number, 2 * BATCH)
        with torch.no_grad():
            hardest = F.cross_entropy(call(x), y, reduction="none").topk(BATCH).indices
        stepped(user, stepper, entropy(call(x[hardest]), x[hardest], y[hardest]))
        yield


@loop
def pseudo_labels(user: User) -> Iterator[None]:
    """The model itself labels a batch in eval mode, and learns of that in training mode."""
    model = WithLoss(dropout=0.1)
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        x, y = user.data(number)
        other = user.data(100 + number)[0]
        call.eval()
        with torch.no_grad():
            labels = call(other).logits.argmax(-1)
        call.train()
        loss = call(x, y).loss + 0.1 * call(other, labels).loss
        stepped(user, stepper, loss)
        yield


@loop
def episodes(user: User) -> Iterator[None]:
    """Log-probabilities of four calls are kept in a list, weighted, and gone backward through at once."""
    model = Net()
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        logs, rewards = [], []
        for part in range(4):
            x, y = user.data(10 * number + part, BATCH // 4)
            logs.append(-F.cross_entropy(call(x), y, reduction="none"))
            rewards.append(x.mean(-1))
        weights = torch.cat(rewards)
        stepped(user, stepper, -(torch.cat(logs) * (weights - weights.mean())).mean())
        yield


class Embedded(nn.Module):
    """A table of words before a body."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.net = nn.Embedding(CLASSES, WIDTH), Net()

    def forward(self, ids: torch.Tensor, y: torch.Tensor) -> Output:
        logits = self.net(self.words(ids))
        return Output(F.cross_entropy(logits, y), logits)


@loop
def adversarial_words(user: User) -> Iterator[None]:
    """FGM: words are moved along their gradient, a second loss is gone backward through, and they are put back."""
    model = Embedded()
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        _, y = user.data(number)
        ids = user.data(100 + number)[1]
        loss = call(ids, y).loss
        loss.backward()
        words = model.words.weight
        assert words.grad is not None
        before = words.data.clone()
        words.data.add_(words.grad / words.grad.norm(), alpha=0.1)
        call(ids, y).loss.backward()
        words.data = before
        stepper.step()
        stepper.zero_grad()
        user.note(loss)
        yield


@loop
def cached_representations(user: User) -> Iterator[None]:
    """GradCache: all parts are encoded without gradients; each again, against the gradients of their loss."""
    model = Net(classes=WIDTH)
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        parts = [user.data(10 * number + part, BATCH // 2)[0] for part in range(4)]
        with torch.no_grad():
            found = [call(part) for part in parts]
        rows = torch.cat(found).requires_grad_()
        scores = rows @ rows.t() / 0.5
        loss = F.cross_entropy(scores, torch.arange(len(rows)).roll(1))
        loss.backward()
        assert rows.grad is not None
        for part, gradient in zip(parts, rows.grad.chunk(4), strict=True):
            (call(part) * gradient).sum().backward()
        stepper.step()
        stepper.zero_grad()
        user.note(loss)
        yield


@loop
def lookahead(user: User) -> Iterator[None]:
    """Slow weights, which every fourth step are moved to the fast ones, and replace them."""
    model = WithLoss()
    stepper = adamw(model)
    slow = [p.detach().clone() for p in model.parameters()]
    call = user.compile(model, stepper)
    for number in range(STEPS):
        x, y = user.data(number)
        stepper.zero_grad()
        loss = call(x, y).loss
        loss.backward()
        stepper.step()
        if number % 4 == 3:
            with torch.no_grad():
                for kept, p in zip(slow, model.parameters(), strict=True):
                    p.copy_(kept.lerp_(p, 0.5))
        user.note(loss)
        yield


@loop
def learned_weights_of_losses(user: User) -> Iterator[None]:
    """Two tasks, whose weights are parameters beside the model, and a gradient of one head's every third step."""
    model, weights = Net(2), nn.Parameter(torch.zeros(2))
    stepper = torch.optim.AdamW([*model.parameters(), weights], 1e-3)
    call = user.compile(model, stepper)
    for number in range(STEPS):
        x, y = user.data(number)
        one, two = (F.cross_entropy(out, y) for out in call(x))
        loss = (weights.neg().exp() * torch.stack([one, two]) + weights).sum()
        if number % 3 == 2:
            stepper.zero_grad()
            one.backward(retain_graph=True)
            user.losses.append(sum(p.grad.norm().item() for p in model.parameters() if p.grad is not None))
        stepped(user, stepper, loss)
        yield


@loop
def statistics_frozen(user: User) -> Iterator[None]:
    """Batch norms stay in eval mode from the fourth step on, while a copy is evaluated."""
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.BatchNorm1d(64), nn.GELU(), Net2(64))
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        call.train()
        if number >= 4:
            model[1].eval()
        x, y = user.data(number)
        stepped(user, stepper, entropy(call(x), x, y))
        if number % 5 == 4:
            with torch.no_grad():
                user.note(entropy(copy.deepcopy(model).eval()(x), x, y))
        yield


class Net2(nn.Module):
    """A wide layer and a head."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(size, 2 * size), nn.Linear(2 * size, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.silu(self.inner(x)))
