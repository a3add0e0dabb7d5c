"""Families of lines in `forward`: values, views, writes, state, random numbers. Each may write nothing."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tests.modules.writer import Writer

_UNARY = (
    "torch.tanh({})", "torch.sin({})", "torch.relu({})", "torch.sigmoid({})", "F.gelu({})", "F.silu({})",
    "F.softplus({})", "{}.abs()", "{} * 0.5", "{} + 1", "-{}", "F.leaky_relu({})", "F.softmax({}, -1)",
    "{}.square() * 0.3", "({} ** 2 + 1).rsqrt()", "{}.cumsum(-1) * 0.2", "F.hardtanh({})",
    "F.layer_norm({0}, {0}.shape[-1:])",
    "{}.mean(0)", "{}.sum(-1) * 0.3", "{}.amax(-1)", "{}.logsumexp(-1)", "{}.contiguous()", "{}.clone()", "{}.flip(0)",
    "{}.roll(1, 0)", "{0}.to({0}.dtype)", "{}.exp().clamp(max=3)", "{}.sort(-1).values",
)  # fmt: skip
_BINARY = (
    "{} + {}", "{} - {}", "{} * {}", "torch.maximum({}, {})", "torch.lerp({}, {}, 0.3)",
    "torch.where({0} > 0, {0}, {1})",
    "{} / (1 + {}.abs())", "torch.atan2({}, {}.abs() + 1)", "torch.addcmul({0}, {0}, {1}, value=0.5)",
)  # fmt: skip


def unary(w: Writer) -> None:
    x = w.pick()
    if x is not None:
        w.let(w.choose(_UNARY).format(x))


def binary(w: Writer) -> None:
    x, y = w.pick(), w.pick()
    if x is not None and y is not None:
        w.let(w.choose(_BINARY).format(x, y))


def join(w: Writer) -> None:
    x = w.pick(lambda v: v.dim() > 0)
    if x is not None:
        y = w.pick(lambda v: v.shape == w.value(x).shape)
        w.let(f"torch.{w.choose(('cat', 'stack'))}([{x}, {y or x}], {w.dim(x)})")


def linear(w: Writer) -> None:
    x = w.pick(lambda v: v.dim() > 0 and v.shape[-1] <= 8)
    if x is None:
        return
    size = w.value(x).shape[-1]
    tied = [name for name, p in w.model.named_parameters() if p.dim() == 2 and "." not in name]
    if tied and w.chance(0.4):
        weight = w.choose(tied)
        w.let(w.choose(("F.linear({}, self.{})", "{} @ self.{}", "{} * self.{}[0]")).format(x, weight))
        return
    out = w.rng.randint(3, 6)
    kind = w.rng.random()
    if kind < 0.4:
        w.let(f"F.linear({x}, {w.parameter(out, size)}, {w.parameter(out)})")
    elif kind < 0.7:
        w.let(f"{w.module(f'nn.Linear({size}, {out})')}({x})")
    elif kind < 0.85:
        w.let(f"{x} * {w.parameter(size)}")
    else:
        layer = w.module(f"nn.Linear({size}, {size})")
        other = w.module(f"nn.Linear({size}, {size})")
        w.state(f"{other}.weight = {layer}.weight")
        w.let(f"{other}(torch.tanh({layer}({x})))")


# -- views --------------------------------------------------------------------------------------------------------


def view_of(w: Writer, x: str) -> str:
    """An expression of a view of a value, in one of many ways."""
    value = w.value(x)
    if value.dim() == 0:
        return w.choose((f"{x}.view(1)", f"{x}.expand(3)", f"{x}.unsqueeze(0)", f"{x}[None]"))
    d, e, n = w.dim(x), w.dim(x), value.shape[w.dim(x)]
    k = value.shape[d]
    cut = w.rng.randint(1, max(1, k - 1))
    sized, step = w.rng.randint(1, min(3, k)), w.rng.randint(1, 3)
    start = ":, " * d
    options = [
        f"{x}[{start}{min(1, k - 1)}:]", f"{x}[{start}::2]", f"{x}[{start}:{cut}]", f"{x}.transpose({d}, {e})",
        f"{x}.movedim({d}, {e})", f"{x}.reshape(-1)", f"{x}.view(-1)", f"{x}.flatten()", f"{x}.select({d}, {k - 1})",
        f"{x}.narrow({d}, {k - cut}, {cut})", f"{x}.unfold({d}, {sized}, {step})", f"{x}.unsqueeze({d})",
        f"{x}.squeeze()", f"{x}.chunk(2, {d})[{w.choose((0, -1))}]", f"{x}.unbind({d})[0]", f"{x}.detach()",
        f"{x}.split({cut}, {d})[-1]", f"{x}.view_as({x})", f"{x}[..., 0]",
        f"{x}.expand(2, {', '.join(['-1'] * value.dim())})",
        f"torch.as_strided({x}, ({min(n, 3)}, 2), ({step}, 1))", f"{x}.unflatten({d}, (-1, 1))", f"{x}.mT", f"{x}.T",
        f"torch.as_strided({x}, (2, 2), (2, {step}), {w.rng.randint(0, 2)})",
        f"{x}.detach().{w.choose(('mT', 'view(-1)'))}",
    ]  # fmt: skip
    if value.dim() > 1:
        options += [f"{x}.diagonal()", f"{x}.diagonal(1)", f"{x}.permute({', '.join(map(str, _order(w, value)))})"] * 2
    return w.choose(options)


def _order(w: Writer, value: Tensor) -> list[int]:
    return w.rng.sample(range(value.dim()), value.dim())


def view(w: Writer) -> None:
    x = w.pick()
    if x is not None:
        w.let(view_of(w, x))


def views(w: Writer) -> None:
    x = w.pick(lambda v: v.dim() > 0 and v.shape[0] % 2 == 0)
    if x is not None:
        a, b = w.name(), w.name()
        how = w.choose((f"chunk(2, {w.dim(x)})", f"split({w.value(x).shape[0] // 2})", "tensor_split(2)"))
        w.add(f"{a}, {b} = {x}.{how}", a, b)


# -- writes -------------------------------------------------------------------------------------------------------


def write_to(w: Writer, target: str, source: str | None) -> str:
    """A statement that writes to what an expression gives."""
    options = [
        f"{target}.mul_(0.5)", f"{target}.add_(1)", f"{target}.tanh_()", f"{target}.zero_()", f"{target}.fill_(0.3)",
        f"{target}.clamp_(-1, 1)", f"{target}.masked_fill_({target} > 0.5, 0.2)", f"{target}.neg_()",
        f"{target}.mul_(torch.sigmoid({target}))", f"F.relu({target}, inplace=True)", f"{target}[...] = 0.7",
        f"{target}[0] = 0.4", f"{target}[..., 0] *= 2", f"{target}[..., -1:].mul_(-1)", f"{target}.sin_()",
    ]  # fmt: skip
    if source is not None:
        options += [
            f"{target}.add_({source})", f"{target}.mul_({source})", f"{target}.copy_({source})",
            f"{target} += {source}",
            f"{target}.sub_({source}, alpha=0.5)", f"{target}[0] = {source}[0]", f"{target}[..., 0] = {source}[..., 0]",
            f"{target}.index_put_((torch.tensor([0]),), {source}[0])", f"{target}[torch.tensor([0, -1])] = {source}[0]",
            f"{target}.index_add_(0, torch.tensor([0]), {source}[:1])", f"{target}[{target} > 0] = 0.1",
            f"{target}.masked_scatter_({target} > 0.8, {source})", f"{target}.lerp_({source}, 0.3)",
            f"{target}.index_copy_(0, torch.tensor([0]), {source}[:1])", f"{target}.addcmul_({source}, {source})",
        ]  # fmt: skip
    return w.choose(options)


def write(w: Writer) -> None:
    """A write to a value, or through one of its views: plain, transposed, gapped, overlapping."""
    x = w.pick(lambda v: v.dim() > 0)
    if x is None:
        return
    if w.chance(0.5):
        fresh = w.let(f"{x}{w.choose(('.clone()', ' * 1', '.sin()', ' + 0.5'))}")
        x = fresh or x
    target = x
    if w.chance(0.6):
        target = view_of(w, x)
        if w.chance(0.4):
            name = w.let(target)
            target = name or x
    same = w.pick(lambda v: v.shape == w.value(target).shape if target in w.env else True)
    line = write_to(w, target, same if w.chance(0.7) else None)
    if w.chance(0.15):
        line = f"with torch.no_grad():\n    {line}"
    if w.add(line) and w.chance(0.5):
        w.let(f"{x} * 1.5")


# -- state ----------------------------------------------------------------------------------------------------------


def buffer(w: Writer) -> None:
    """A buffer that is read, written in place or through a view, or swapped."""
    known = [name for name, b in w.model.named_buffers() if "." not in name and b.is_floating_point() and b.dim()]
    if known and w.chance(0.5):
        name = f"self.{w.choose(known)}"
    else:
        x = w.pick(lambda v: v.dim() > 0)
        shape = w.value(x).shape[-w.rng.randint(1, 2) :] if x is not None else (4,)
        name = w.buffer(*shape)
    w.env["_"] = w.model.get_buffer(name.removeprefix("self."))
    shape = w.env["_"].shape
    x = w.pick(lambda v: v.shape == shape)
    source = None if x is None else f"{x}.detach()"
    kind = w.rng.random()
    if kind < 0.3:
        w.add(write_to(w, name, source))
    elif kind < 0.5:
        w.add(write_to(w, view_of(w, "_").replace("_", name, 1) if w.chance(0.5) else f"{name}[0]", None))
    elif kind < 0.65:
        w.add(f"{name} = {name} * 0.9 + {source or 0.1}")
    elif kind < 0.75:
        number = w.name("n")
        w.state(f"self.register_buffer('{number}', torch.zeros((), dtype=torch.long))")
        w.add(f"self.{number} += 1")
    elif kind < 0.85:
        w.let(f"{name}.clone()")
    y = w.pick(lambda v: v.dim() == 0 or v.shape[-len(shape) :] == shape)
    if y is not None:
        w.let(f"{y} {w.choose('+*-')} {name}")


def attribute(w: Writer) -> None:
    x = w.pick()
    if x is None:
        return
    if w.chance(0.5):
        w.let(f"{x} * {w.switch(w.choose((1.5, 0.5, 2)))}")
    else:
        name, flag = w.name(), w.switch(w.choose((True, False)))
        w.add(f"if {flag}:\n    {name} = torch.sin({x})\nelse:\n    {name} = {x} * 0.25", name)


def plain_tensor(w: Writer) -> None:
    x = w.pick(lambda v: v.dim() > 0)
    if x is not None:
        name = w.name("t")
        w.state(f"self.{name} = draw({w.value(x).shape[-1]}, seed={w.count})")
        w.let(f"{x} * self.{name}")


# -- what autograd is told --------------------------------------------------------------------------------------------


def no_grad(w: Writer) -> None:
    x, name = w.pick(), w.name()
    if x is not None:
        w.add(f"with torch.no_grad():\n    {name} = {w.choose(_UNARY).format(x)}", name)


def straight_through(w: Writer) -> None:
    x = w.pick()
    if x is None:
        return
    w.helper("Sign", SIGN)
    rounded = w.choose(("torch.round({0} * 2) / 2", "torch.sign({0})", "({0} > 0).to({0}.dtype)")).format(x)
    w.let(
        w.choose(
            (f"{x} + ({rounded} - {x}).detach()", f"({rounded}).detach() + {x} - {x}.detach()", f"Sign.apply({x})")
        )
    )


SIGN = """
class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx, g):
        return g * (ctx.saved_tensors[0].abs() < 1)
"""


def functional(w: Writer) -> None:
    x = w.pick(lambda v: v.dim() > 0)
    if x is None:
        return
    w.helper("checkpoint", "from torch.utils.checkpoint import checkpoint\n")
    inner = w.choose(("torch.tanh(r) * r", "r + (r.round() - r).detach()", "(r * 2).sigmoid()"))
    outer = w.choose(("torch.vmap(lambda r: {})({})", "checkpoint(lambda r: {}, {}, use_reentrant=False)"))
    w.let(outer.format(inner, x))


def broken(w: Writer) -> None:
    x = w.pick()
    if x is not None and w.chance(0.4):
        name = w.name()
        w.add(w.choose((
            f"torch._dynamo.graph_break()\n{name} = {x} * 2",
            f"if {x}.sum() > 0.3:\n    {name} = torch.sin({x})\nelse:\n    {name} = {x} * 0.25",
            f"{name} = {x} * float({x}.detach().mean())",
        )), name)  # fmt: skip


# -- random numbers, statistics, heads --------------------------------------------------------------------------------


def dropout(w: Writer) -> None:
    x = w.pick()
    if x is not None:
        layer = w.module("nn.Dropout(0.3)") if w.chance(0.3) else None
        drawn = w.choose((f"F.dropout({x}, 0.4, self.training)", f"{x} * (torch.rand({x}.shape) > 0.3)"))
        w.let(f"{layer}({x})" if layer else drawn)


def batch_norm(w: Writer) -> None:
    x = w.pick(lambda v: v.dim() in (2, 3) and v.shape[0] > 1)
    if x is not None:
        affine = w.choose(("", ", affine=False", ", momentum=None"))
        w.let(f"{w.module(f'nn.BatchNorm1d({w.value(x).shape[1]}{affine})')}({x})")


def head(w: Writer) -> None:
    """A module that nothing reads, or whose result may not be returned."""
    x = w.pick(lambda v: v.dim() > 0)
    if x is not None:
        layer = w.module(f"nn.Linear({w.value(x).shape[-1]}, 3)")
        if w.chance(0.6):
            w.let(f"{layer}({x})")


FAMILIES: tuple[tuple[int, Callable[[Writer], None]], ...] = (
    (6, unary), (4, binary), (2, join), (6, linear), (8, view), (3, views), (7, write), (4, buffer), (2, attribute),
    (1, plain_tensor), (1, no_grad), (2, straight_through), (1, functional), (1, broken), (2, dropout), (2, batch_norm),
    (1, head),
)  # fmt: skip


def statement(w: Writer) -> None:
    """Write a line or a few of a family drawn by weight."""
    families = [family for _, family in FAMILIES]
    w.rng.choices(families, [weight for weight, _ in FAMILIES])[0](w)
