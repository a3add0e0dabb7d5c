"""Random modules whose inputs vary in batch and length, as source: each runs at several sizes beside eager."""

from __future__ import annotations

import copy
import dataclasses
import linecache
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

WIDTH = 8

# The first is planned by its own sizes, the second with symbols, which serve the others: smaller and larger ones.
SIZES = ((4, 12), (3, 7), (6, 20), (2, 5), (5, 16))


@dataclasses.dataclass(frozen=True)
class Value:
    """A name in the source, with its sizes: `b`, `s` and numbers, or what is computed of them."""

    name: str
    shape: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class SizedProgram:
    """A module as source.

    Attributes:
        source: defines the class `Net`, whose `forward` takes `x` (batch, length, `WIDTH`), `ids` and `mask` of
            (batch, length), and returns a loss and other tensors.
        trains: whether it is run with gradients.
    """

    source: str
    trains: bool

    def build(self, number: int) -> nn.Module:
        """The module; its weights are the same each time."""
        name, room = f"<random sizes {number}>", dict[str, Any]()
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(True), name)
        exec(compile(self.source, name, "exec"), room)
        torch.manual_seed(number)
        return room["Net"]().train(self.trains)  # type: ignore[no-any-return]


class Writer:
    """Writes statements of which each makes a value of earlier ones."""

    def __init__(self, stream: random.Random) -> None:
        self.random, self.lines, self.made = stream, list[str](), list[str]()
        self.values = [Value("x", ("b", "s", str(WIDTH)))]

    def new(self, text: str, *shape: str) -> Value:
        value = Value(f"v{len(self.lines)}", tuple(shape))
        self.lines.append(f"{value.name} = {text}")
        self.values.append(value)
        return value

    def module(self, text: str) -> str:
        name = f"m{len(self.made)}"
        self.made.append(f"self.{name} = {text}")
        return f"self.{name}"

    def pick(self, fits: Callable[[tuple[str, ...]], bool]) -> Value | None:
        """A value whose sizes fit, a late one more often."""
        found = [value for value in self.values if fits(value.shape)]
        return self.random.choice(found[-4:]) if found else None

    def rows(self) -> Value:
        """A value of (batch, some length, width)."""
        return self.pick(lambda shape: len(shape) == 3 and shape[0] == "b" and shape[2] == str(WIDTH)) or self.values[0]

    def whole(self) -> Value:
        """A value of (batch, length, width)."""
        return self.pick(lambda shape: shape == ("b", "s", str(WIDTH))) or self.values[0]


def _linear(w: Writer) -> None:
    x = w.rows()
    w.new(f"{w.module(f'nn.Linear({WIDTH}, {WIDTH})')}({x.name})", *x.shape)


def _pointwise(w: Writer) -> None:
    x = w.pick(lambda shape: True) or w.values[0]
    text = w.random.choice(
        ("F.gelu({})", "{}.tanh()", "F.silu({})", "{}.sigmoid() * 2 - {}", "{}.clamp(-1, 1)", "{} * s ** -0.5 + 1 / b")
    )
    w.new(text.format(x.name, x.name), *x.shape)


def _add(w: Writer) -> None:
    x = w.rows()
    y = w.pick(lambda shape: shape == x.shape) or x
    w.new(f"{x.name} {w.random.choice('+-*')} {y.name}", *x.shape)


def _norm(w: Writer) -> None:
    x = w.rows()
    w.new(f"{w.module(f'nn.LayerNorm({WIDTH})')}({x.name})", *x.shape)


def _batch_norm(w: Writer) -> None:
    x = w.rows()
    name = w.module(f"nn.BatchNorm1d({WIDTH})")
    w.new(f"{name}({x.name}.flatten(0, 1)).view({x.name}.shape)", *x.shape)


def _attention(w: Writer) -> None:
    x = w.whole()
    heads = f"{x.name}.view(b, s, 2, {WIDTH // 2}).transpose(1, 2)"
    options = w.random.choice(("is_causal=True", "attn_mask=mask[:, None, None] | eye", ""))
    w.lines.append("eye = torch.eye(s, dtype=torch.bool, device=x.device)")
    text = f"F.scaled_dot_product_attention({heads}, {heads}, {heads}, {options})"
    w.new(f"{text}.transpose(1, 2).reshape(b, s, {WIDTH})", "b", "s", str(WIDTH))


def _scores(w: Writer) -> None:
    x = w.whole()
    scores = w.new(f"{x.name} @ {x.name}.transpose(1, 2) / {WIDTH}", "b", "s", "s")
    if w.random.random() < 0.5:
        w.lines.append("steps = torch.arange(s, device=x.device)")
        name = scores.name
        scores = w.new(f"{name}.masked_fill(steps[None, :] > steps[:, None], -1e4)", "b", "s", "s")
    w.new(f"{scores.name}.softmax(-1) @ {x.name}", *x.shape)


def _pieces(w: Writer) -> None:
    x = w.rows()
    length = x.shape[1]
    shorter, half = f"{length} - 1", f"({length} + 1) // 2"
    cut, left = w.random.choice((("1:", shorter), (":-1", shorter), ("::2", half), (":s // 2 + 1", "s // 2 + 1")))
    if length == "s" or (not cut.startswith(":s") and "//" not in length and "- 1" not in length):
        w.new(f"{x.name}[:, {cut}]", "b", f"({left})", str(WIDTH))


def _join(w: Writer) -> None:
    x, y = w.rows(), w.rows()
    if len(x.shape[1]) + len(y.shape[1]) < 30:
        w.new(f"torch.cat(({x.name}, {y.name}), 1)", "b", f"({x.shape[1]} + {y.shape[1]})", str(WIDTH))


def _stacked(w: Writer) -> None:
    x = w.whole()
    w.new(f"torch.stack(({x.name}, x), 1).amax(1)", *x.shape)


def _reduce(w: Writer) -> None:
    x = w.rows()
    dim = w.random.choice((0, 1))
    how = w.random.choice(("mean({}, keepdim=True)", "amax({}, keepdim=True)", "sum({}, keepdim=True) / s"))
    w.new(f"{x.name} - {x.name}.{how.format(dim)}", *x.shape)


def _running(w: Writer) -> None:
    x = w.rows()
    ways = "{}.cumsum(1) / {}.shape[1]", "{}.flip(1)", "{}.roll(1, 1)", "F.pad({}, (0, 0, 1, 0))[:, :-1]"
    how = w.random.choice(ways)
    w.new(how.format(x.name, x.name), *x.shape)


def _embedding(w: Writer) -> None:
    name = w.module(f"nn.Embedding(32, {WIDTH})")
    text = w.random.choice(("ids", "torch.arange(s, device=x.device).expand(b, s)"))
    w.new(f"{name}({text})", "b", "s", str(WIDTH))


def _masked(w: Writer) -> None:
    x = w.whole()
    how = w.random.choice(
        (
            "{}.masked_fill(mask[..., None], 0.5)",
            "torch.where(mask[..., None], {}, {} * 0.1)",
            "{} * mask[..., None] / mask.sum(1).clamp_min(1)[:, None, None]",
        )
    )
    w.new(how.format(x.name, x.name), *x.shape)


def _gathered(w: Writer) -> None:
    x = w.whole()
    w.lines.append("last = mask.sum(1).clamp(1, s) - 1")
    picked = w.new(f"{x.name}[torch.arange(b, device=x.device), last]", "b", str(WIDTH))
    w.new(f"{x.name} + {picked.name}[:, None]", *x.shape)


def _convolution(w: Writer) -> None:
    x, stride = w.whole(), w.random.choice((1, 2))
    name = w.module(f"nn.Conv1d({WIDTH}, {WIDTH}, 3, stride={stride}, padding=1)")
    length = "s" if stride == 1 else "((s - 1) // 2 + 1)"
    w.new(f"{name}({x.name}.transpose(1, 2)).transpose(1, 2)", "b", length, str(WIDTH))


def _written(w: Writer) -> None:
    x = w.rows()
    name = w.new(f"{x.name}.clone()", *x.shape).name
    w.lines.append(
        w.random.choice(
            (f"{name}[:, 0] = 0.25", f"{name}[:, -1] += {name}[:, 0]", f"{name}.mul_(0.5)", f"{name}[0].zero_()")
        )
    )


def _branch(w: Writer) -> None:
    x = w.rows()
    test = w.random.choice(("s > 10", "s % 2 == 0", "b * s > 40", "b < s"))
    w.new(f"{x.name} * 2 if {test} else {x.name} + 1", *x.shape)


def _repeated(w: Writer) -> None:
    x = w.whole()
    how = w.random.choice((f"repeat(2, 1, 1).view(2, b, s, {WIDTH}).mean(0)", "repeat_interleave(2, 1)[:, ::2]"))
    w.new(f"{x.name}.{how}", *x.shape)


def _looped(w: Writer) -> None:
    x = w.rows()
    name = w.module(f"nn.Linear({WIDTH}, {WIDTH})")
    made = w.new(f"{x.name}", *x.shape).name
    w.lines.append(f"for _ in range(2): {made} = {made} + {name}({made}).tanh()")


KINDS = (
    _linear, _linear, _linear, _pointwise, _pointwise, _add, _add, _norm, _batch_norm, _attention, _scores, _pieces,
    _join, _stacked, _reduce, _running, _embedding, _masked, _gathered, _convolution, _written, _branch, _repeated,
    _looped,
)  # fmt: skip


def sized_program(number: int) -> SizedProgram:
    """The program of this number, the same at every run."""
    stream = random.Random(number)
    writer, trains = Writer(stream), stream.random() < 0.75
    _linear(writer)
    for _ in range(stream.randint(3, 9)):
        stream.choice(KINDS)(writer)
    last = writer.values[-1]
    others = [value.name for value in writer.values[1:-1] if stream.random() < 0.15][:2]
    lines = ["b, s = ids.shape", *writer.lines]
    loss = stream.choice(("{}.square().mean()", "{}.sum() / (b * s)", "{}.flatten(1).logsumexp(1).mean()"))
    terms = " + ".join(f"{value.name}.mean()" for value in writer.values[1:] if len(value.shape) == 3)
    lines.append(f"return {loss.format(last.name)} + ({terms}) * 0.1, {', '.join(others)}{',' if others else ''}")
    made = "".join(f"        {line}\n" for line in writer.made)
    body = "".join(f"        {line}\n" for line in lines)
    return SizedProgram(
        "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n\n\nclass Net(nn.Module):\n"
        f"    def __init__(self):\n        super().__init__()\n{made}\n"
        f"    def forward(self, x, ids, mask):\n{body}",
        trains,
    )


def inputs_of(number: int, batch: int, length: int) -> dict[str, torch.Tensor]:
    """Inputs of these sizes; of each row at least one token is not masked."""
    stream = torch.Generator().manual_seed(1000 * number + 40 * batch + length)
    mask = torch.rand(batch, length, generator=stream) < 0.7
    mask[:, 0] = True
    x = torch.randn(batch, length, WIDTH, generator=stream)
    return {"x": x, "ids": torch.randint(0, 32, (batch, length), generator=stream), "mask": mask}


def run_step(run: Any, model: nn.Module, inputs: dict[str, torch.Tensor], trains: bool) -> list[torch.Tensor | None]:
    """Outputs, gradients of the weights and of `x`, and buffers; gradients are let go of."""
    x = inputs["x"].clone().requires_grad_(trains)
    with torch.set_grad_enabled(trains):
        outputs = run(x, inputs["ids"], inputs["mask"])
        if trains:
            (outputs[0] + sum(value.float().square().mean() for value in outputs[1:])).backward()
    found = [*(value.detach().clone() for value in outputs), x.grad, *(p.grad for p in model.parameters())]
    model.zero_grad(set_to_none=True)
    return [*found, *(buffer.clone() for buffer in model.buffers())]


def compared(
    number: int, compile_model: Callable[[nn.Module], Any], sizes: Sequence[tuple[int, int]] = SIZES
) -> tuple[Any, list[str]]:
    """A program run at each of these sizes beside eager.

    Returns:
        What `compile_model` made of it, and a line for each difference.
    """
    program = sized_program(number)
    model = program.build(number)
    twin = copy.deepcopy(model)
    run, differences = compile_model(model), list[str]()
    for batch, length in sizes:
        inputs = inputs_of(number, batch, length)
        expected = run_step(twin, twin, inputs, program.trains)
        found = run_step(run, model, inputs, program.trains)
        if len(found) != len(expected):
            differences.append(f"at {batch} x {length}: {len(found)} results for {len(expected)}")
            continue
        for place, (a, b) in enumerate(zip(found, expected, strict=True)):
            if a is None or b is None:
                same = a is None and b is None
            else:
                same = a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, 2e-4, 2e-5)
            if not same:
                differences.append(f"at {batch} x {length}: result {place} is {_told(a)} for {_told(b)}")
    return run, differences


def _told(value: torch.Tensor | None) -> str:
    return "None" if value is None else f"{tuple(value.shape)} {value.flatten()[:2].tolist()}"
