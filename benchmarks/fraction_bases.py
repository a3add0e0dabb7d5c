"""What a fraction is of, over what eager takes at its peak in the same loop.

python -m benchmarks.fraction_bases [LOOP …] [--share 0.9] [--engine aten|inductor]

Each loop runs twice in processes of their own: as eager, with the allocator looked at from outside from the first step
on (`benchmarks/allocator_watch.c`), and within a fraction. The base is that fraction's budget over the share, with the
process's other tensors, of which no fraction is (a gradient that an output of the last step retains is one, though
eager has let go of it at its peak). `(checkpointed)` behind a loop's name: each layer of its model is, by
the model itself. Above 1 a budget is larger than the user asked for; below, it is tighter by as much. Ends with 1 where
a base is more than 1.02 of eager's peak.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from benchmarks.allocator_watch import preloaded
from benchmarks.loops import LOOPS, STEPS, User
from benchmarks.loops.user import BATCH, CLASSES, WIDTH, Net, loop, plain, stepped
from benchmarks.whole_loops import EFFORT, PATIENCE, apart, trained
from memopt.solve import recompute

MOST = 1.02
CHECKPOINTED = " (checkpointed)"


@loop
def few_classes(user: User) -> Iterator[None]:
    return plain(user, lambda out, x, y: F.cross_entropy(out, y % 40), model=Net(classes=40))


@loop
def outputs_let_go(user: User) -> Iterator[None]:
    model = Net(classes=40)
    stepper, call = user.with_adamw(model)
    for x, y in user.batches():
        stepped(user, stepper, F.cross_entropy(call(x), y % 40))
        yield


@loop
def packed(user: User) -> Iterator[None]:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True), nn.Linear(WIDTH, CLASSES)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            found, _ = self.inner(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
            return self.head(pad_packed_sequence(found, batch_first=True)[0])

    model = Packed()
    stepper, call = user.with_adamw(model)
    for x, y in user.batches():
        lengths = torch.arange(BATCH // 32, 0, -1).repeat_interleave(2)
        out = call(x.view(32, -1, WIDTH), lengths)
        stepped(user, stepper, F.cross_entropy(out.flatten(0, 1), y.view(32, -1)[:, : out.shape[1]].flatten()))
        yield


@loop
def tied(user: User) -> Iterator[None]:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.net = nn.Embedding(CLASSES, WIDTH), Net()
            self.net.heads[0].weight = self.embedding.weight

        def forward(self, y: torch.Tensor) -> torch.Tensor:
            return self.net(self.embedding(y))

    model = Tied()
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        _, y = user.data(number)
        stepped(user, stepper, F.cross_entropy(call(y), y.roll(1)))
        yield


NAMES = (
    *("cross_entropy", "few_classes", "outputs_let_go", "loss_inside", "two_backwards", "retained_gradient"),
    *("siamese", "triplet", "two_losses_in_turn", "truncated_backward", "packed", "accumulation"),
    *("smaller_last_group", "gan", "gan_together"),
    *("tied", "ties", "adapts", "freezes", "unfreezes", "cross_entropy" + CHECKPOINTED, "evaluation_now_and_then"),
    *("eager_head", "frozen_teacher", "keeps_last_two_outputs", "sharpness_aware"),
)


def row(name: str, share: float, engine: str) -> tuple[str, float]:
    """A line of the table, and the base over eager's peak."""
    plain_name = name.removesuffix(CHECKPOINTED)
    checkpointed = plain_name != name
    eager = apart(trained, plain_name, None, "aten", checkpointed)
    found = apart(trained, plain_name, share, engine, checkpointed)
    if "failed" in eager or "failed" in found:
        raise RuntimeError(f"{name}: {eager.get('trace') or found.get('trace') or 'the process ended'}")
    peak = max(eager["peaks"])
    if not found["own"]:
        return f"| {name} | {peak / 1e6:.3f} | refused | | {found.get('why', '')[:100]} |", 0.0
    base = found["own"] / share + found["others"]
    most = max(found["peaks"], default=0) / peak
    return f"| {name} | {peak / 1e6:.3f} | {base / peak:.3f} | {most:.3f} | {found.get('why', '')[:100]} |", base / peak


def main() -> int:
    preloaded("benchmarks.fraction_bases")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loops", nargs="*", metavar="LOOP", help=f"of {', '.join(LOOPS)}; by default some of them")
    parser.add_argument("--share", type=float, default=0.9)
    parser.add_argument("--engine", default="aten")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    os.environ.setdefault("MEMOPT_CACHE_DIR", tempfile.mkdtemp())
    recompute.EFFORT, recompute.PATIENCE = EFFORT, PATIENCE
    print(f"torch {torch.__version__}, {args.engine}, {args.share:g}\n")
    print("| loop | eager, MB | base / eager | largest step / eager | refused |\n|---|---|---|---|---|", flush=True)
    over = 0
    for name in args.loops or NAMES:
        line, found = row(name, args.share, args.engine)
        print(line, flush=True)
        over += found > MOST
    return int(over > 0)


if __name__ == "__main__":
    sys.exit(main())
