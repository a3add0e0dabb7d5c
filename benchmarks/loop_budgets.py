"""Train in users' own loops within 0.9, 0.7 and 0.5 of eager's peak, and measure whole steps, what is outside included.

python -m benchmarks.loop_budgets [LOOP …] [--engine aten|inductor] [--tiny] [--json FILE]

The model returns no loss: the loop computes it, clips, accumulates, averages weights, keeps what it likes. A step's
peak is what lives when it begins, found storage by storage, and the allocator's events from there to the step's end.
The first steps are not measured: in those memopt plans, and looks at the allocator itself, which nobody else can do
meanwhile; and what was allocated before the allocator was looked at is released unseen. A row is a loop; a cell is the
largest peak over the budget, or the least that a refusal names, over the budget; "said" where memopt itself reports
that a step was over it. Prints the table last, and ends with 1 where a step was over unsaid.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import memopt
from memopt.memory.measure import Recording

SHARES = (0.9, 0.7, 0.5)
ALONE, STEPS, MEASURED = 4, 8, 2  # steps before the allocator is looked at, of all steps, of which so many count
WIDTH, CLASSES, BATCH, DEPTH = 32, 96, 512, 8
TINY = ("cross_entropy", "accumulation", "keeps_probabilities", "clip_norm")

Step = Callable[[], Any]
Loop = Callable[["User"], Iterator[None]]
LOOPS: dict[str, Loop] = {}


def loop(function: Loop) -> Loop:
    LOOPS[function.__name__] = function
    return function


class User:
    """What a loop asks of its surroundings: models, data, and the stand-in under a budget, or the model itself."""

    def __init__(self, budget: int | None, engine: str) -> None:
        self.budget, self.engine, self.compiled = budget, engine, list[Any]()

    def compile(self, model: nn.Module, optimizer: Any = None) -> Any:
        if self.budget is None:
            return model
        self.compiled.append(memopt.compile(model, self.budget, optimizer=optimizer, backend=self.engine))
        return self.compiled[-1]

    def data(self, seed: int, size: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(size, WIDTH, generator=generator)
        return x, torch.randint(0, CLASSES, (size,), generator=generator)

    @property
    def said(self) -> bool:
        return any("over its budget" in note for item in self.compiled for note in item.report.notes)


class Net(nn.Module):
    """A body whose activations outweigh its weights, and a head of many classes, or several."""

    def __init__(self, heads: int = 1, classes: int = CLASSES, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, classes) for _ in range(heads))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.body:
            x = x + self.dropout(F.gelu(layer(x)).tanh())
        found = [head(x) for head in self.heads]
        return found[0] if len(found) == 1 else tuple(found)


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-3, **options)


def plain(
    user: User,
    loss_of: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    model: nn.Module | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    given: bool = True,
    clip: Callable[[nn.Module], Any] | None = None,
    autocast: bool = False,
    zero: str = "first",
    set_to_none: bool = True,
    after: Callable[[nn.Module, int], Any] | None = None,
) -> Iterator[None]:
    """A usual loop; what a caller's variables hold from one step to the next is as in a loop at a module's level."""
    model = Net() if model is None else model
    stepper = optimizer(model)
    call = user.compile(model, stepper if given else None)
    for number in range(STEPS):
        x, y = user.data(number)
        if zero == "first":
            stepper.zero_grad(set_to_none=set_to_none)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = call(x)
            loss = loss_of(out, x, y)
        if zero == "backward":
            stepper.zero_grad(set_to_none=set_to_none)
        loss.backward()
        if clip is not None:
            clip(model)
        stepper.step()
        if zero == "last":
            stepper.zero_grad(set_to_none=set_to_none)
        if after is not None:
            after(model, number)
        yield


def entropy(out: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out, y)


# -- losses ---------------------------------------------------------------------------------------------------------


@loop
def cross_entropy(user: User) -> Iterator[None]:
    return plain(user, entropy)


@loop
def sum_of_outputs(user: User) -> Iterator[None]:
    return plain(user, lambda out, x, y: out.sum())


@loop
def mean_of_squares(user: User) -> Iterator[None]:
    return plain(user, lambda out, x, y: F.mse_loss(out, x.new_zeros(out.shape)))


@loop
def label_smoothing(user: User) -> Iterator[None]:
    return plain(user, lambda out, x, y: F.cross_entropy(out, y, label_smoothing=0.1))


@loop
def temperature(user: User) -> Iterator[None]:
    return plain(user, lambda out, x, y: -(out / 2).softmax(-1).log().gather(1, y[:, None]).mean())


@loop
def focal(user: User) -> Iterator[None]:
    def loss(out: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logs = out.log_softmax(-1)
        return -((1 - logs.exp()) ** 2 * logs * F.one_hot(y, CLASSES).float()).sum(-1).mean()

    return plain(user, loss)


@loop
def three_losses(user: User) -> Iterator[None]:
    def loss(out: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return entropy(out, x, y) + 0.1 * out.square().mean() + 0.1 * (out.softmax(-1) * out.log_softmax(-1)).sum()

    return plain(user, loss)


@loop
def double_precision(user: User) -> Iterator[None]:
    return plain(user, lambda out, x, y: F.cross_entropy(out.double(), y))


@loop
def contrastive(user: User) -> Iterator[None]:
    def loss(out: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = F.normalize(out, dim=-1)
        return F.cross_entropy(z @ z.t() / 0.1, torch.arange(len(z)))

    return plain(user, loss, model=Net(classes=24))


@loop
def two_heads(user: User) -> Iterator[None]:
    return plain(user, lambda out, x, y: entropy(out[0], x, y) + out[1].tanh().square().mean(), model=Net(2))


@loop
def distillation(user: User) -> Iterator[None]:
    teacher = Net().requires_grad_(False)

    def loss(out: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = teacher(x)
        soft = F.kl_div((out / 2).log_softmax(-1), (target / 2).softmax(-1), reduction="batchmean")
        return soft + entropy(out, x, y)

    return plain(user, loss)


@loop
def head_outside(user: User) -> Iterator[None]:
    head = nn.Linear(24, 256)
    return plain(user, lambda out, x, y: entropy(head(out), x, y), model=Net(classes=24))


@loop
def autocast(user: User) -> Iterator[None]:
    return plain(user, lambda out, x, y: F.cross_entropy(out.float(), y), autocast=True)


@loop
def keeps_probabilities(user: User) -> Iterator[None]:
    held: dict[str, Any] = {}

    def loss(out: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        held["probabilities"], held["logits"] = out.softmax(-1), out.detach().clone()
        held["right"] = out.argmax(-1) == y
        return entropy(out, x, y)

    return plain(user, loss)


@loop
def keeps_last_two_outputs(user: User) -> Iterator[None]:
    held: list[Any] = []

    def loss(out: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        held[:] = [*held[-1:], out.detach()]
        return entropy(out, x, y)

    return plain(user, loss)


@loop
def grows_after_two_steps(user: User) -> Iterator[None]:
    calls = [0]

    def loss(out: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        more = (out.softmax(-1) * out.log_softmax(-1)).sum() if calls[0] > 2 else 0.0
        return entropy(out, x, y) + more

    return plain(user, loss)


@loop
def loss_inside(user: User) -> Iterator[None]:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x).log_softmax(-1)[:, 0].mean().neg()

    return plain(user, lambda out, x, y: out, model=Whole())


@loop
def two_backwards(user: User) -> Iterator[None]:
    model = Net(2)
    stepper = adamw(model)
    call = user.compile(model, stepper)
    for number in range(STEPS):
        x, y = user.data(number)
        stepper.zero_grad()
        first, second = call(x)
        entropy(first, x, y).backward(retain_graph=True)
        second.square().mean().backward()
        stepper.step()
        yield


@loop
def gradients_by_hand(user: User) -> Iterator[None]:
    model = Net()
    call, parameters = user.compile(model), list(model.parameters())
    for number in range(STEPS):
        x, y = user.data(number)
        found = torch.autograd.grad(entropy(call(x), x, y), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, found, strict=True):
                parameter.sub_(gradient, alpha=1e-2)
        yield


@loop
def retained_gradient(user: User) -> Iterator[None]:
    def loss(out: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out.retain_grad()
        return entropy(out, x, y)

    return plain(user, loss)


# -- accumulation ------------------------------------------------------------------------------------------------------


def accumulated(user: User, *, zero: str, set_to_none: bool = True, given: bool = True) -> Iterator[None]:
    model = Net()
    stepper = adamw(model)
    call = user.compile(model, stepper if given else None)
    for number in range(STEPS):
        if zero == "first":
            stepper.zero_grad(set_to_none=set_to_none)
        for part in range(3):
            x, y = user.data(3 * number + part)
            (entropy(call(x), x, y) / 3).backward()
        stepper.step()
        if zero == "last":
            stepper.zero_grad(set_to_none=set_to_none)
        yield


@loop
def accumulation(user: User) -> Iterator[None]:
    return accumulated(user, zero="last")


@loop
def accumulation_zero_first(user: User) -> Iterator[None]:
    return accumulated(user, zero="first")


@loop
def accumulation_of_zeros(user: User) -> Iterator[None]:
    return accumulated(user, zero="last", set_to_none=False)


@loop
def accumulation_optimizer_unknown(user: User) -> Iterator[None]:
    return accumulated(user, zero="last", given=False)


@loop
def zeros(user: User) -> Iterator[None]:
    return plain(user, entropy, set_to_none=False)


@loop
def zero_before_backward(user: User) -> Iterator[None]:
    return plain(user, entropy, zero="backward")


@loop
def zero_last(user: User) -> Iterator[None]:
    return plain(user, entropy, zero="last")


@loop
def never_zeroed(user: User) -> Iterator[None]:
    return plain(user, entropy, zero="never")


@loop
def two_losses_in_turn(user: User) -> Iterator[None]:
    model = Net()
    stepper = adamw(model)
    call = user.compile(model, stepper)
    for number in range(STEPS):
        stepper.zero_grad()
        for part in range(2):
            x, y = user.data(2 * number + part)
            loss = entropy(call(x), x, y) if part else call(x).square().mean()
            loss.backward()
        stepper.step()
        yield


# -- steps' ends -------------------------------------------------------------------------------------------------------


@loop
def clip_norm(user: User) -> Iterator[None]:
    return plain(user, entropy, clip=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0))


@loop
def clip_norm_one_by_one(user: User) -> Iterator[None]:
    return plain(user, entropy, clip=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False))


@loop
def gradients_logged(user: User) -> Iterator[None]:
    return plain(user, entropy, clip=lambda model: [parameter.grad.clone() for parameter in model.parameters()])


@loop
def adamw_foreach(user: User) -> Iterator[None]:
    return plain(user, entropy, optimizer=lambda model: adamw(model, foreach=True, amsgrad=True))


@loop
def adamw_fused(user: User) -> Iterator[None]:
    return plain(user, entropy, optimizer=lambda model: adamw(model, fused=True))


@loop
def adamw_one_by_one(user: User) -> Iterator[None]:
    return plain(user, entropy, optimizer=lambda model: adamw(model, foreach=False))


@loop
def momentum(user: User) -> Iterator[None]:
    return plain(user, entropy, optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))


@loop
def momentum_unknown(user: User) -> Iterator[None]:
    return plain(
        user, entropy, given=False, optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    )


@loop
def gradient_scaler(user: User) -> Iterator[None]:
    model = Net()
    stepper, scaler = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), torch.amp.GradScaler("cpu")
    call = user.compile(model, stepper)
    for number in range(STEPS):
        x, y = user.data(number)
        loss = entropy(call(x), x, y)
        stepper.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(stepper)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(stepper)
        scaler.update()
        yield


@loop
def average_before(user: User) -> Iterator[None]:
    model = Net()
    mean = copy.deepcopy(model)

    @torch.no_grad()
    def after(model: nn.Module, number: int) -> None:
        for kept, new in zip(mean.parameters(), model.parameters(), strict=True):
            kept.mul_(0.9).add_(new * 0.1)

    return plain(user, entropy, model=model, after=after)


@loop
def average_from_second_step(user: User) -> Iterator[None]:
    kept: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def after(model: nn.Module, number: int) -> None:
        for name, value in model.state_dict().items() if number else ():
            kept[name] = value.clone() if name not in kept else kept[name].lerp_(value, 0.1)

    return plain(user, entropy, after=after)


@loop
def averaged_model(user: User) -> Iterator[None]:
    model = Net()
    mean = torch.optim.swa_utils.AveragedModel(model)
    return plain(user, entropy, model=model, after=lambda model, number: mean.update_parameters(model))


@loop
def evaluation_between(user: User) -> Iterator[None]:
    model = Net(dropout=0.1)
    stepper = adamw(model)
    call = user.compile(model, stepper)
    for number in range(STEPS):
        call.train()
        x, y = user.data(number)
        loss = entropy(call(x), x, y)
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        call.eval()
        with torch.no_grad():
            (call(user.data(number, 2 * BATCH)[0]).argmax(-1) == 0).float().mean()
        yield


@loop
def adversarial_pair(user: User) -> Iterator[None]:
    model = Net()
    stepper = torch.optim.SGD(model.parameters(), 0.1)
    call = user.compile(model, stepper)
    for number in range(STEPS):
        x, y = user.data(number)
        entropy(call(x), x, y).backward()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter.grad, alpha=0.05)
        stepper.zero_grad()
        entropy(call(x), x, y).backward()
        with torch.no_grad():
            for parameter, old in zip(model.parameters(), before, strict=True):
                parameter.copy_(old)
        stepper.step()
        stepper.zero_grad()
        del before
        yield


# -- measuring ---------------------------------------------------------------------------------------------------------


def storages(beside: frozenset[int] = frozenset()) -> dict[int, int]:
    """Bytes of all storages that Python's tensors show on the CPU, by address; without those beside."""
    gc.collect()
    found: dict[int, int] = {}
    for item in gc.get_objects():
        if not issubclass(type(item), torch.Tensor):
            continue
        for tensor in (item, item.grad if item.is_leaf else None):
            if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.device.type != "cpu":
                continue
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in beside:
                found[storage.data_ptr()] = storage.nbytes()
    return found


def peaks(name: str, budget: int | None, engine: str) -> tuple[list[int], int, bool]:
    """The peaks of the last steps; bytes that live when one begins; whether memopt said that one was over."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    beside = frozenset(storages())
    user, found, held = User(budget, engine), list[int](), 0
    steps = LOOPS[name](user)
    for _ in range(ALONE):
        next(steps)
    for _ in range(STEPS - ALONE):
        live = storages(beside)
        held = max(held, sum(live.values()))
        with Recording(torch.device("cpu"), live) as recording:
            next(steps)
        found.append(sum(live.values()) + recording.peak)
    said = user.said
    steps.close()
    return found[-MEASURED:], held, said


def cell(name: str, share: float, eager: int, engine: str) -> dict[str, Any]:
    budget, began = int(share * eager), time.perf_counter()
    row: dict[str, Any] = {"share": share, "budget": budget}
    try:
        found, _, said = peaks(name, budget, engine)
        row |= {"peaks": found, "said": said}
    except memopt.BudgetError as error:
        row |= {"minimum": error.minimum_bytes, "why": str(error)}
    except Exception as error:
        row |= {"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    return row | {"seconds": round(time.perf_counter() - began, 1)}


def shown(item: dict[str, Any]) -> str:
    if "failed" in item:
        return "failed"
    if "minimum" in item:
        return f"least {item['minimum'] / item['budget']:.2f}"
    peak = max(item["peaks"]) / item["budget"]
    mark = "" if peak <= 1 else " said" if item["said"] else " OVER"
    last = f", then {item['peaks'][-1] / item['budget']:.3f}" if peak > 1 else ""
    return f"{peak:.3f}{last}{mark}"


def table(rows: list[dict[str, Any]]) -> str:
    shares = [item["share"] for item in rows[0]["cells"]]
    lines = ["| loop | eager, MB | held | " + " | ".join(f"{share:g}" for share in shares) + " |"]
    lines.append("|---|---|---|" + "---|" * len(shares))
    for row in rows:
        cells = " | ".join(shown(item) for item in row["cells"])
        lines.append(f"| {row['loop']} | {row['eager'] / 1e6:.2f} | {row['held'] / row['eager']:.2f} | {cells} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loops", nargs="*")
    parser.add_argument("--engine", default="aten")
    parser.add_argument("--tiny", action="store_true", help=f"only {', '.join(TINY)}, at 0.7")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("memopt").setLevel(logging.CRITICAL)
    shares, rows = (0.7,) if args.tiny else tuple(args.shares), []
    for name in args.loops or (TINY if args.tiny else LOOPS):
        found, held, _ = peaks(name, None, args.engine)
        eager = max(found)
        cells = [cell(name, share, eager, args.engine) for share in shares]
        rows.append({"loop": name, "eager": eager, "held": held, "cells": cells})
        seconds = sum(item["seconds"] for item in cells)
        print(f"{name} ({seconds:.0f} s): {'; '.join(map(shown, cells))}", file=sys.stderr, flush=True)
        for item in cells:
            if "failed" in item or "why" in item:
                print(f"    {item['share']}: {item.get('failed') or item['why']}", file=sys.stderr, flush=True)
    if args.json:
        Path(args.json).write_text(
            json.dumps({"torch": torch.__version__, "engine": args.engine, "rows": rows}, indent=1) + "\n"
        )
    print(table(rows))
    return int(any("OVER" in shown(item) or "failed" in item for row in rows for item in row["cells"]))


if __name__ == "__main__":
    sys.exit(main())
